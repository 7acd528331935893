#!/usr/bin/env python3
"""Writes llmc/text/unicode_tables.h: the Unicode data for splitting and normalising text.

    pip install tokenizers unicodedata2==16.0.0
    python3 dev/make_unicode_tables.py llmc/text/unicode_tables.h

Our tokens must equal those of Hugging Face's tokenizers (0.23.3 when the committed file was made), whose parts follow
different versions of Unicode:

    regular expressions    categories of Unicode 16.0, like Oniguruma
    NFC                    Unicode 10: later marks have combining class 0, later compositions do not exist
    Digits                 Unicode 17, but its 13 digits that 16.0 does not have are left out here
"""

import sys
import textwrap

try:
    import unicodedata2 as unicodedata
except ImportError:
    import unicodedata
from tokenizers import Regex, normalizers, pre_tokenizers

VERSION = "16.0.0"
CATEGORIES = "Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cc Cf Cs Co Cn".split()
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcd"
HANGUL = range(0xAC00, 0xAC00 + 11172)   # composed by arithmetic

nfc = normalizers.NFC().normalize_str
nfd = normalizers.NFD().normalize_str


def characters():
    return (chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000)


def runs(values):
    """(first, length, value) of every run of equal values."""
    first = 0
    for i in range(1, len(values) + 1):
        if i == len(values) or values[i] != values[first]:
            yield first, i - first, values[first]
            first = i


def combining_class(character):
    """0 where the library does not reorder the mark."""
    value = unicodedata.combining(character)
    other = "\u0334" if value > 1 else "\u0315"   # classes 1 and 232
    pair = character + other if value > 1 else other + character
    return value if value and nfd(pair) != pair else 0


def decompositions():
    """(character, its parts, whether the parts compose back to it), one level deep, if the library has it."""
    for character in characters():
        parts = unicodedata.decomposition(character)
        if parts and not parts.startswith("<") and ord(character) not in HANGUL and nfd(character) != character:
            yield ord(character), [int(part, 16) for part in parts.split()], nfc(character) == character


def check_categories(categories):
    every = "".join(characters())
    for category in CATEGORIES:
        if category == "Cs":
            continue
        other = pre_tokenizers.Split(Regex(rf"\p{{{category}}}"), "removed").pre_tokenize_str(every)
        members = sum(value == category for value in categories)
        if len(every) - sum(len(text) for text, _ in other) != members:
            sys.exit(f"make_unicode_tables.py: error: the tokenizers package disagrees on category {category} with "
                     f"Unicode {VERSION}: find its version and set it in this script")


def literal(name, comment, text):
    lines = "\n".join(f'    "{line}"' for line in textwrap.wrap(text, 112, break_on_hyphens=False, drop_whitespace=False))
    return f"// {comment}\ninline constexpr const char* {name} =\n{lines};\n"


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    if unicodedata.unidata_version != VERSION:
        sys.exit(f"make_unicode_tables.py: error: this Python has Unicode {unicodedata.unidata_version}, expected "
                 f"{VERSION}: pip install unicodedata2=={VERSION}")
    categories = [unicodedata.category(chr(code)) for code in range(0x110000)]
    check_categories(categories)
    run_lengths = "".join(LETTERS[CATEGORIES.index(value)] + (str(length) if length > 1 else "")
                          for _, length, value in runs(categories))

    classes, end = [], 0
    for first, length, value in runs([combining_class(chr(code)) for code in range(0x110000)]):
        if value:
            classes.append(f"{first - end:x} {length:x} {value:x}")
            end = first + length

    composed, decomposed, last = [], [], {True: 0, False: 0}
    for code, parts, again in decompositions():
        entry = f"{code - last[again]:x} " + " ".join(f"{part:x}" for part in parts + [0] * (2 - len(parts)))
        (composed if again else decomposed).append(entry)
        last[again] = code

    with open(sys.argv[1], "w", encoding="ascii") as file:
        file.write(f"""\
// unicode_tables.h: written by dev/make_unicode_tables.py, which says from what; read by text/unicode.h. Categories
// are of Unicode {VERSION}.
#pragma once

namespace llmc::detail {{

// The general categories, in the order of the letters of category_runs: A to Z, then a to d.
inline constexpr const char* category_names =
    "{' '.join(CATEGORIES)}";

""" + "\n".join([
            literal("category_runs", "From U+0000 on: a category and how many characters have it, one if there is no number.",
                    run_lengths),
            literal("combining_class_runs", "Hexadecimal triples: characters to skip since the last run, length, class; all "
                    "others have class 0.", " ".join(classes) + " "),
            literal("compositions", "Hexadecimal triples: a character less the last one, and the two that compose it.",
                    " ".join(composed) + " "),
            literal("decompositions", "The same for characters that are taken apart and never composed; 0: there is no "
                    "second one.", " ".join(decomposed) + " ")]) + """
}  // namespace llmc::detail
""")


if __name__ == "__main__":
    main()
