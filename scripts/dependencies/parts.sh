# shellcheck shell=bash disable=SC2086    # compilers and flags are lists of words throughout
# The parts with which train_gpt is built, tested and run, and how each is looked for. This is the only list:
# scripts/install_deps.sh, which installs what is missing, and scripts/configure.sh, which tells make what was found,
# both source it, from the root of the repository.
#
# A probe uses the part as train_gpt does: it compiles, links and runs a small program, with the build's own compiler
# and flags, or calls the tool. So a header without its library, a library without its header, and an nvcc that does not
# run all count as missing; and a library from elsewhere (conda, pip, a source build named in CPPFLAGS and LDFLAGS) is
# as good as a package.
#
# From the environment: CXX NVCC MPICC MPIRUN CPPFLAGS CXXFLAGS LDFLAGS NVCCFLAGS CUDNN_HOME CUDNN_FRONTEND_HOME PYTHON
export LC_ALL=C   # names of parts are written in capitals, which a Turkish locale does in its own way

# necessity: required, or optional: without it train_gpt is slower or smaller
# package:   Debian's; -: none that install_deps.sh would install
#   set    part            package               necessity  name
parts='
    build  cxx             g++                   required   a C++20 compiler with OpenMP
    build  cli11           libcli11-dev          required   CLI11
    build  json            nlohmann-json3-dev    required   nlohmann/json
    build  xxhash          libxxhash-dev         required   xxHash
    build  libcrypto       libssl-dev            required   libcrypto
    build  zlib            zlib1g-dev            required   zlib
    build  zstd            libzstd-dev           required   Zstandard
    build  tomlplusplus    libtomlplusplus-dev   required   toml++
    build  mpi             libopenmpi-dev        optional   MPI
    test   catch2          catch2                required   Catch2
    test   boost           libboost-context-dev  required   Boost.Context
    test   asan            g++                   required   AddressSanitizer
    test   python          python3               required   Python
    test   mpirun          openmpi-bin           optional   mpirun
    long   tsan            g++                   required   ThreadSanitizer
    long   ip              iproute2              optional   ip
    run    python          python3               required   Python
    run    bible           bible-kjv             required   the King James Bible
    run    matplotlib      python3-matplotlib    required   matplotlib
    check  clang_format    clang-format          required   clang-format
    check  shellcheck      shellcheck            required   shellcheck
    check  python          python3               required   Python
    fresh  debootstrap     debootstrap           required   debootstrap
    slurm  slurmctld       slurmctld             required   the Slurm controller
    slurm  slurmd          slurmd                required   the Slurm node daemon
    slurm  slurm_client    slurm-client          required   Slurm commands
    slurm  munge           munge                 required   MUNGE
    arm    arm_cxx         g++-aarch64-linux-gnu required   a compiler for aarch64
    arm    qemu            qemu-user             required   qemu-aarch64
    arm    debootstrap     debootstrap           required   debootstrap
    browser chromium       chromium              required   Chromium
    other  nvcc            -                     optional   nvcc
    other  gpu             -                     optional   a GPU
    nvcc   cublaslt        -                     optional   cuBLASLt
    nvcc   nccl            -                     optional   NCCL
    nvcc   cudnn           -                     optional   cuDNN
    nvcc   cudnn_frontend  -                     optional   cudnn-frontend
'

CXX=${CXX:-g++}
NVCC=${NVCC:-nvcc}
MPICC=${MPICC:-mpicc}
flags="-std=c++20 -fopenmp${CPPFLAGS:+ $CPPFLAGS}${CXXFLAGS:+ $CXXFLAGS}"
host_flags="-fopenmp${CXXFLAGS:+ $CXXFLAGS}"
# -ccbin: the compiler itself, even if CXX is "ccache g++". nvcc would split the host's flags at their commas.
nvcc="$NVCC -std=c++20 --expt-relaxed-constexpr -ccbin ${CXX##* } ${CPPFLAGS:-} ${NVCCFLAGS:-}"
nvcc_host=(-Xcompiler "${host_flags//,/\\,}")
[ -z "${LDFLAGS:-}" ] || nvcc_host+=(-Xcompiler "${LDFLAGS//,/\\,}")

# The results for each part: PART.found, PART.answers for make, PART.fault in words. Not in /tmp, where some machines
# run no programs.
probes=$(mkdir -p build && mktemp -d "$PWD/build/probes.XXXXXX")
trap 'rm -rf "$probes"' EXIT

# parts_of SET...: the parts of these sets, each once
parts_of() {
  local wanted=" $* " set part rest
  while read -r set part rest; do
    [[ $wanted != *" $set "* ]] || echo "$part"
  done <<<"$parts" | awk '!seen[$0]++'
}

# entry PART COLUMN: a column of a part's row in the list: 3 package, 4 necessity, 5 name
entry() {
  local set part package necessity name
  while read -r set part package necessity name; do
    [ "$part" = "$1" ] || continue
    case $2 in 3) echo "$package" ;; 4) echo "$necessity" ;; 5) echo "$name" ;; esac
    return
  done <<<"$parts"
}

# look_for PART...: all at once, since it mostly waits for compilers
look_for() {
  local part
  for part in "$@"; do look_for_one "$part" </dev/null & done
  wait
}
look_for_one() {
  local part=$1 dir=$probes/$1.d
  rm -rf "$dir" "$probes/$part.found"
  mkdir "$dir"
  if "probe_$part" >"$probes/$part.answers" 2>"$dir/stray"; then : >"$probes/$part.found"; fi
}
is_there() { [ -e "$probes/$1.found" ]; }

# ---- Helpers for probes: `part` and `dir` are the part that is looked for and a folder of its own ---------------

# answer VARIABLE VALUE: a make variable for build/config.mk; PART_VERSION and the like
answer() { echo "${part^^}_$1 := ${2:-}"; }

# absent WORDS...: the part is missing.  unusable WORDS...: it is there but does not work; make config shows why.
absent() {
  echo "$*" >"$probes/$part.fault"
  return 1
}
unusable() {
  absent "$@" || true
  answer FAULT "$(tr -d "\$#\`'\"\\\\\n" <<<"$*" | sed 's/ *$//')"
  return 1
}

# build NAME COMPILER FLAGS...: the program on standard input -> $dir/NAME; the compiler's output -> $dir/NAME.log
build() {
  local name=$1 compiler=$2
  shift 2
  cat >"$dir/$name.${suffix:-cpp}"
  $compiler "$dir/$name.${suffix:-cpp}" -o "$dir/$name" "$@" >"$dir/$name.log" 2>&1
}

# The line of a compiler's or loader's log that says what is wrong.
first_error() {
  grep -m 1 -iE 'error|cannot find|undefined reference|not found|unsupported' "$1" | sed "s|$dir/||g" | cut -c 1-160 ||
    head -n 1 "$1"
}

# Without a compiler, no other probe can tell what is there.
has_compiler() { includes "$CXX" cstddef || absent "no C++ compiler to look with"; }

# includes COMPILER HEADER [FLAGS...]: whether the header exists, with all that it includes
includes() {
  local compiler=$1 header=$2
  shift 2
  echo "#include <$header>" | $compiler "$@" -x c++ -E - >/dev/null 2>&1
}

# includes_name HEADER: whether a file of that name exists, even if headers that it includes do not
includes_name() { printf '#if !__has_include(<%s>)\n#error\n#endif\n' "$1" | $CXX $flags -x c++ -E - >/dev/null 2>&1; }

# header_version COMPILER HEADER EXPRESSION: the value of an expression of the header's macros; nothing without it
header_version() {
  printf '#include <%s>\n#define TEXT_(x) #x\n#define TEXT(x) TEXT_(x)\nTEXT(%s)\n' "$2" "$3" >"$dir/version.cpp"
  { $1 -E "$dir/version.cpp" 2>/dev/null || true; } | tail -n 1 | tr -d '\\" ' | sed -n '/^[0-9][0-9.]*$/p'
}

# at_least VERSION LEAST
at_least() { [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | sed -n 1p)" = "$2" ]; }

# library HEADER LIBRARY: builds the program on standard input, which prints the version, with both, and runs it
library() {
  local header=$1 library=$2 with_header=no with_library=no version
  if build try "$CXX" $flags ${LDFLAGS:-} "$library"; then
    if version=$("$dir/try" 2>"$dir/run.log"); then answer VERSION "$version"; return; fi
    unusable "$header and $library are there, but a program with them fails: ${version:-$(first_error "$dir/run.log")}"
    return
  fi
  has_compiler || return
  ! includes "$CXX $flags" "$header" || with_header=yes
  ! build link "$CXX" $flags ${LDFLAGS:-} "$library" <<<'int main() {}' || with_library=yes
  case $with_header-$with_library in
    no-no) absent "neither $header nor $library" ;;
    yes-no) unusable "$header is there, but $library is not: $(first_error "$dir/link.log")" ;;
    no-yes) unusable "$library is there, but $header is not" ;;
    yes-yes) unusable "$header and $library are there, but do not fit together: $(first_error "$dir/try.log")" ;;
  esac
}

# headers HEADER EXPRESSION: for a part without a library: compiles the program on standard input. That takes seconds,
# so a text that compiled once is not compiled again: build/probed has the checksums.
headers() {
  local header=$1 text version sum=
  { cat && printf '#define TEXT_(x) #x\n#define TEXT(x) TEXT_(x)\nconst char version[] = TEXT(%s);\n' "$2"; } >"$dir/all.cpp"
  if text=$($CXX $flags -x c++ -E - <"$dir/all.cpp" 2>"$dir/try.log"); then
    version=$(tail -n 1 <<<"$text" | tr -cd '0-9.')
    sum=$(echo "$CXX $flags $($CXX --version) $text" | cksum)
    if ! grep -qxF "$sum" build/probed 2>/dev/null; then
      if ! build try "$CXX" $flags -fsyntax-only <"$dir/all.cpp"; then
        unusable "$header is there, but does not compile: $(first_error "$dir/try.log")"
        return
      fi
      mkdir -p build && echo "$sum" >>build/probed
    fi
    answer VERSION "$version"
  elif ! has_compiler; then
    return 1
  elif includes_name "$header"; then
    unusable "$header is there, but not all that it includes: $(first_error "$dir/try.log")"
  else
    absent "no $header"
  fi
}

# tool COMMAND...: whether it runs
tool() {
  if "$@" >"$dir/log" 2>&1; then answer VERSION "$(grep -oE '[0-9]+(\.[0-9]+)+' "$dir/log" | sed -n 1p)"; return; fi
  if command -v "$1" >/dev/null; then
    unusable "$(command -v "$1") is there, but fails: $(tail -n 1 "$dir/log" | cut -c 1-160)"
  else
    absent "no program $1"
  fi
}

# shellcheck source=scripts/dependencies/probes.sh
. scripts/dependencies/probes.sh
