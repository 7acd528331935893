# mutate.awk: puts a switch into every bound, offset, stride and index of a kernel's source, so that one build holds all
# mutants of the file: MUTANT(n) is 1 in the run in which mutant n is on, else 0 (mutants.h).
#
#   awk -v file=NAME -v first=N -v list=LIST -f mutate.awk SOURCE >MUTATED
#
# a < b becomes a < 1 + b, a + b becomes a + 1 + b, a * b becomes a * (1 + b) (also / and %), a[b] becomes a[1 + b], and
# the step of a loop is one more; where memory is asked for, one less. LIST gets a line for each, "N<tab>FILE: the line as it then reads". What the compiler evaluates is left
# alone: MUTANT is 0 there. So are addresses, which differ from run to run.
BEGIN { mutants = first }

function add(before, after, rest) {   # the line is `before` + 1 + `after`; rest: what was after it
  text[mutants - first] = before sign "1 + " after rest
  return sign "MUTANT(" mutants++ ") + "
}

{   # is this line, or the one that opens the block it is in, about memory that is asked for?
  asks = /scratch\(|shared =|shared_bytes/ || above
  above = asks && /\{ *$/
}
/"|^ *#|^ *\/\/|constexpr|static_assert|template <|using |operator|alignas|uintptr_t|SHARED\(|BlockSize </ { print; next }
{
  comment = index($0, "//")
  code = comment ? substr($0, 1, comment - 1) : $0
  out = ""
  sign = asks ? "-" : ""
  declares = code ~ /^ *(Pack|Pair|Sums|float|double|bool|T|u?int[0-9_t]*) [a-z_]+\[/   # arrays, by their sizes
  for (i = 1; i <= length(code); ) {
    rest = substr(code, i)
    if (match(rest, /^ (<|>|<=|>=|\+) /) || (match(rest, /^ \+= [A-Za-z.]+\)/) && match(rest, /^ \+= /))) {
      i += RLENGTH
      out = out substr(rest, 1, RLENGTH) add(substr(code, 1, i - 1), substr(code, i), "")
    } else if (match(rest, /^ [*\/%] ([A-Za-z_][A-Za-z_0-9.]*|[0-9]+)/) && substr(rest, RLENGTH + 1, 1) !~ /[[(<{.:-]/) {
      operand = substr(rest, 4, RLENGTH - 3)
      i += RLENGTH
      out = out substr(rest, 1, 3) "(" add(substr(code, 1, i - 1 - length(operand)) "(", operand ")", substr(code, i)) operand ")"
    } else if (!declares && match(rest, /^[A-Za-z_0-9\]]\[[^\]&=]/) && !match(rest, /^.\[[^\]]* \+ /)) {
      i += 2
      out = out substr(rest, 1, 2) add(substr(code, 1, i - 1), substr(code, i), "")
    } else {
      out = out substr(rest, 1, 1)
      ++i
    }
  }
  print out substr($0, length(code) + 1)
}

END {
  for (m = 0; m < mutants - first; ++m) {
    sub(/^ +/, "", text[m])
    sub(/ +$/, "", text[m])
    print first + m "\t" file ": " text[m] >list
  }
}
