#!/usr/bin/env python3
"""Downloads HellaSwag (Zellers et al. 2019) and tokenizes its validation questions for the trainer.

    python3 data/hellaswag.py
    python3 data/hellaswag.py --tokenizer tokenizer.json --out data/hellaswag/mine.jsonl

writes one JSON object per line, as described in data/README.md. The texts, and where a context ends and its endings
begin, are the lm-evaluation-harness's (task hellaswag), so scores are comparable.

Exit status: 0 done, 1 refused or failed with the reason in one line on stderr, 128+n ended by signal n.
"""

import json
import os
import re
import sys

sys.dont_write_bytecode = True   # data/ holds data
from documents import Piece   # noqa: E402
from prepare import download   # noqa: E402
from programs import DataError, replacing, run_program   # noqa: E402
from text_tokenizers import make_tokenizer   # noqa: E402
from tokenize_text import Parser   # noqa: E402

BASE = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data"
FILE = "hellaswag_val.jsonl"
FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "hellaswag")


def clean(text):
    """Removes WikiHow's marks from a question: [header], [title], [step] and [substeps]."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def texts(question):
    """(context, endings). KeyError, TypeError, ...: not a question."""
    context = f"{question['activity_label']}: {question['ctx_a']} {question['ctx_b'].capitalize()}"
    return clean(context), [clean(ending) for ending in question["endings"]]


def split_tokens(encode, context, ending):
    """The tokens of context and " " + ending, tokenized as one text. White space at the end of the context belongs to
    the ending, with whose first word it forms a token."""
    kept = context.rstrip()
    first, whole = encode(kept), encode(f"{context} {ending}")
    return first, whole[len(first):]


def read_questions(path):
    """Yields (where, context, endings, label). DataError: a line is not a question."""
    wanted = "expected an object with the strings activity_label, ctx_a, ctx_b, four endings and a label from 0 to 3"
    with open(path, encoding="utf-8") as file:
        try:
            for number, row in enumerate(file, start=1):
                where = f"{path}:{number}"
                try:
                    question = json.loads(row)
                    context, endings = texts(question)
                    label = int(question["label"])
                    "".join([context, *endings]).encode()   # a lone surrogate is no character
                except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
                    raise DataError(f"{where}: {type(error).__name__} {error}; {wanted}") from None
                if len(endings) != 4 or not 0 <= label < 4:
                    raise DataError(f"{where}: {len(endings)} endings and the label {label}; {wanted}")
                yield where, context, endings, label
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: {error}; {wanted} in every line") from None


def tokenize(path, tokenizer, out):
    """Writes the questions of `path` to `out`, all or none; returns the numbers of questions and tokens."""
    def encode(text):
        return tokenizer.format.unpack(tokenizer.encode(Piece(path, 1, True, text.encode())))

    questions = tokens = 0
    with replacing(out) as file:
        for where, context, endings, label in read_questions(path):
            pairs = [split_tokens(encode, context, ending) for ending in endings]
            choices = [choice for _, choice in pairs]
            if not all(choices):
                raise DataError(f"{where}: an ending has no tokens: {endings}; correct or remove the line")
            row = {"context": pairs[0][0], "choices": choices, "lengths": [len(e) for e in endings], "label": label}
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
            questions += 1
            tokens += len(row["context"]) + sum(map(len, choices))
        if not questions:
            raise DataError(f"{path}: the file is empty; delete it to download it again, or give another --input")
    return questions, tokens


def main(arguments):
    parser = Parser(prog="hellaswag.py", allow_abbrev=False,
                    description="Downloads HellaSwag and tokenizes its 10,042 validation questions.")
    parser.add_argument("--input", metavar="FILE", help=f"a file in the format of {FILE}, instead of downloading it")
    parser.add_argument("--out", metavar="FILE", default=os.path.join(FOLDER, "hellaswag.jsonl"),
                        help="output, replaced if it exists (default: data/hellaswag/hellaswag.jsonl)")
    parser.add_argument("--tokenizer", default="gpt2", help="'gpt2' (the default), a .tiktoken file, a tokenizer.json, "
                        "'bytes'; use the model's")
    parser.add_argument("--eot", metavar="TOKEN", help="end-of-text token of the tokenizer.json, if unusual")
    parser.add_argument("--base-url", metavar="URL", default=BASE, help="another server")
    options = parser.parse_args(arguments)
    tokenizer = make_tokenizer(options)   # fail before downloading if it is unusable
    folder = os.path.dirname(options.out) or "."
    path = options.input or os.path.join(folder, FILE)
    if os.path.realpath(path) == os.path.realpath(options.out):
        raise DataError(f"--out {options.out} is the input file itself; give another name")
    os.makedirs(folder, exist_ok=True)
    if not options.input:
        download(f"{options.base_url.rstrip('/')}/{FILE}", path)
    questions, tokens = tokenize(path, tokenizer, options.out)
    print(f"{options.out}: {questions:,} questions, {tokens:,} tokens ({options.tokenizer})")


if __name__ == "__main__":
    run_program("hellaswag.py", main)
