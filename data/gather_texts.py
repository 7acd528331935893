#!/usr/bin/env python3
"""Gathers text in many scripts from Debian's packages, to test and time tokenizers on:

    data/gather_texts.py --out build/texts                 200 MB; needs apt-get's package lists and the network

Downloads manual pages in all languages, the definitions of locales, and Unicode's CLDR (names and annotations in 700
languages), without installing them, and writes OUT/texts.jsonl, one {"text": ...} a document, and OUT/scripts.txt, the
letters of each script in it. The order of the documents depends on the packages alone.
"""

import argparse
import collections
import glob
import gzip
import json
import os
import random
import re
import subprocess
import sys
import unicodedata

LANGUAGES = "cs da de el es fi fr hu id it ja mk nb nl pl pt-br ro ru sr sv tr uk vi zh".split()
PACKAGES = ["manpages", "manpages-dev", "unicode-cldr-core", "locales", "erlang-manpages", "libssl-doc", "tcl8.6-doc",
            "tk8.6-doc", "libx11-doc", "ocaml-man", *(f"manpages-{name}" for name in LANGUAGES),
            *(f"manpages-{name}-dev" for name in "cs da de es fr it ja nl pl pt-br ru uk".split())]
TAG = re.compile(r"<!--.*?-->|<[^>]*>", re.S)
ENTITIES = {"&lt;": "<", "&gt;": ">", "&quot;": '"', "&apos;": "'", "&amp;": "&"}


def download(folder):
    """The unpacked packages, each in a folder of its own."""
    os.makedirs(folder, exist_ok=True)
    for package in PACKAGES:
        root = os.path.join(folder, package)
        if os.path.exists(root):
            continue
        for older in glob.glob(f"{glob.escape(root)}_*.deb"):   # of a run that was interrupted
            os.remove(older)
        command = ["apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", package]
        apt = subprocess.run(command, cwd=folder, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
        if apt.returncode != 0 and re.search("Unable to locate package|has no candidate", apt.stderr):
            print(f"gather_texts.py: {package} is in no package list of this machine: left out", file=sys.stderr)
            continue
        if apt.returncode != 0:
            sys.exit(f"gather_texts.py: apt-get download {package}: {' '.join(apt.stderr.split())}; check the network, and "
                     "run this again: it goes on with this package")
        archive, = glob.glob(f"{glob.escape(root)}_*.deb")
        subprocess.run(["dpkg-deb", "-x", archive, root + ".new"], check=True)
        os.remove(archive)
        os.rename(root + ".new", root)


def text_of(path):
    """The text of a file; None: it is not of a kind that has any."""
    if "/man/" in path and path.endswith(".gz"):
        with gzip.open(path) as file:
            data = file.read()
    elif path.endswith(".xml") or "/i18n/locales/" in path:
        with open(path, "rb") as file:
            data = file.read()
    else:
        return None
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    if path.endswith(".xml"):   # the lines that have text
        lines = (TAG.sub("", line).strip() if "<!" not in line else "" for line in text.split("\n"))
        text = "\n".join(filter(None, lines))
        for entity, character in ENTITIES.items():
            text = text.replace(entity, character)
    elif "/i18n/locales/" in path:   # "<U0041>"
        text = re.sub(r"<U([0-9A-F]{4,8})>", lambda match: chr(int(match[1], 16)), text)
    return text


def script(character):
    """Roughly, by the first word of the character's name: LATIN, CYRILLIC, CJK; CJK COMPATIBILITY is CJK, too."""
    return unicodedata.name(character, "?").split()[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="build/texts", metavar="FOLDER")
    parser.add_argument("--bytes", type=int, default=200_000_000, help="at most (default: 200 MB)")
    options = parser.parse_args()
    packages = os.path.join(options.out, "packages")
    download(packages)
    texts, seen = [], set()
    for parent, folders, files in os.walk(packages):
        folders.sort()
        for name in sorted(files):
            path = os.path.join(parent, name)
            text = None if os.path.islink(path) else text_of(path)
            if text and text not in seen:
                seen.add(text)
                texts.append(text)
    random.Random(1).shuffle(texts)
    letters, written, documents = collections.Counter(), 0, 0
    path = os.path.join(options.out, "texts.jsonl")
    with open(path + ".new", "w", encoding="utf-8") as out:
        for text in texts:
            size = len(text.encode())
            if written + size > options.bytes:
                continue
            written, documents = written + size, documents + 1
            out.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            letters.update(text)
    os.replace(path + ".new", path)
    scripts = collections.Counter()
    for character, count in letters.items():
        if unicodedata.category(character).startswith("L"):
            scripts[script(character)] += count
    with open(os.path.join(options.out, "scripts.txt"), "w", encoding="utf-8") as out:
        for name, count in scripts.most_common():
            out.write(f"{name} {count}\n")
    print(f"{path}: {written / 1e6:.1f} MB in {documents:,} documents, {sum(n >= 1000 for n in scripts.values())} scripts of "
          "1,000 letters or more")


if __name__ == "__main__":
    main()
