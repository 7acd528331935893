#!/usr/bin/env python3
"""Downloads a dataset and tokenizes it to shards, with GPT-2's tokenizer.

    python3 data/prepare.py shakespeare
    python3 data/prepare.py tinystories
    python3 data/prepare.py fineweb-edu --tokens 10e9

writes data/NAME/NAME_train_000000.bin, NAME_val_000000.bin, ... and gpt2_tokenizer.bin in the same folder. Sources are
downloaded and tokenized one by one. Run the same command again after an interruption: a download resumes at its byte,
tokenizing at the first unfinished source, and the shards come out the same.

Exit status: 0 done, 1 refused or failed with the reason in one line on stderr, 128+n ended by signal n.
"""

import argparse
import dataclasses
import http.client
import json
import os
import re
import sys
import time
import urllib.error
import urllib.request

sys.dont_write_bytecode = True   # data/ holds data
from documents import Draw, read_chunks   # noqa: E402
from programs import DataError, locked, replacing, run_program   # noqa: E402
from text_tokenizers import make_tokenizer   # noqa: E402
from tokenize_text import Parser, Progress, Splitter, count, encode_all   # noqa: E402
from token_shards import ShardWriter, existing_shards, publish   # noqa: E402
from write_tokenizer import write_tokenizer   # noqa: E402

SHARDS_OF_A_SOURCE = 100   # shard numbers reserved for each source
RETRIES = 4


@dataclasses.dataclass(frozen=True)
class Dataset:
    base: str                  # of all URLs
    about: str
    train: tuple = ()          # URLs relative to base
    val: tuple = ()            # empty: val_fraction of the documents of the training data
    val_fraction: float = 0
    separator: bytes = None    # between the documents of a text file; None: parquet
    listing: str = ""          # relative to base: a list of the files, instead of `train`; {config} is substituted


DATASETS = {
    "shakespeare": Dataset(
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data", "tiny Shakespeare, 1 MB",
        train=("tinyshakespeare/input.txt",), val_fraction=0.1, separator=b"\n\n"),
    "tinystories": Dataset(
        "https://huggingface.co/datasets/roneneldan/TinyStories", "TinyStories (Eldan & Li 2023), 2 GB",
        train=("resolve/main/TinyStoriesV2-GPT4-train.txt",), val=("resolve/main/TinyStoriesV2-GPT4-valid.txt",),
        separator=b"<|endoftext|>\n"),
    "fineweb-edu": Dataset(
        "https://huggingface.co", "FineWeb-Edu (Penedo et al. 2024), 10 to 1300 billion tokens", val_fraction=0.005,
        listing="api/datasets/HuggingFaceFW/fineweb-edu/tree/main/{config}"),
}
CONFIGS = {"all": "data", "sample-10BT": "sample/10BT", "sample-100BT": "sample/100BT", 
           "sample-350BT": "sample/350BT"}


# ---- Downloads ----------------------------------------------------------------------------------


class PastTheEnd(Exception):
    """No byte of the file is in the range that was asked for; the argument is the file's size, if the server says it."""


def fetch(url, headers=None):
    """The response. DataError: the server refuses; OSError: a connection error that may be temporary."""
    try:
        return urllib.request.urlopen(urllib.request.Request(url, headers=headers or {}), timeout=60)
    except urllib.error.HTTPError as error:
        if error.code == 416:
            raise PastTheEnd(error.headers.get("Content-Range", "").rpartition("/")[2]) from None
        if error.code in (408, 429) or error.code >= 500:
            raise OSError(f"status {error.code} {error.reason}") from None
        raise DataError(f"{url}: the server returned {error.code} {error.reason}; check the URL; --base-url sets "
                        "another server") from None


def with_retries(url, action, progress=lambda: 0):
    """action(), retried after a pause when the connection breaks; DataError after RETRIES tries without progress."""
    attempt, before = 0, progress()
    while True:
        try:
            return action()
        except (OSError, http.client.HTTPException) as error:   # such as a body that ends too early
            attempt = 0 if progress() > before else attempt + 1
            before = progress()
            if attempt == RETRIES:
                raise DataError(f"{url}: {getattr(error, 'reason', error)}; check the network and retry: it resumes "
                                "where it stopped") from None
            time.sleep(0.1 * 3**attempt)


def download(url, path):
    """Downloads the file at `path` unless it exists; resumes from PATH.part."""
    if os.path.exists(path):
        return
    part = path + ".part"

    def size():
        return os.path.getsize(part) if os.path.exists(part) else 0

    def rest():
        have = size()
        with fetch(url, {"Range": f"bytes={have}-"} if have else {}) as response:
            resumed = response.status == 206
            total = int(response.headers.get("Content-Length", -1)) + (have if resumed else 0)
            with open(part, "ab" if resumed else "wb") as file:
                progress = Progress(total if total > 0 else None, f"{os.path.basename(path)}: ")
                progress.skip(file.tell())
                while block := response.read(1 << 18):
                    file.write(block)
                    progress.add(len(block), 0)
                progress.clear()
                done = file.tell()
        if 0 <= total != done:
            raise OSError(f"the connection ended after {done:,} of {total:,} bytes")

    try:
        with_retries(url, rest, size)
    except PastTheEnd as error:
        if str(error) != str(size()):   # else it ended between the last byte and the new name
            os.remove(part)
            with_retries(url, rest, size)
    os.replace(part, path)


def list_parquet(dataset, base, config):
    """URLs of the parquet files, sorted, from the Hugging Face API."""
    first = url = f"{base}/{dataset.listing.format(config=config)}?recursive=true"
    paths = []
    while url:   # paginated
        def page(url=url):
            with fetch(url) as response:
                return json.loads(response.read()), response.headers.get("Link", "")
        entries, link = with_retries(url, page)
        paths += [entry["path"] for entry in entries if entry["path"].endswith(".parquet")]
        more = re.search(r'<([^>]+)>; *rel="next"', link)
        url = more[1] if more else None
    if not paths:
        raise DataError(f"no parquet file listed at {first}")
    return [f"{base}/datasets/HuggingFaceFW/fineweb-edu/resolve/main/{path}" for path in sorted(paths)]


# ---- Tokens -------------------------------------------------------------------------------------


def tokenize_source(index, split, path, dataset, options, prefix, room):
    """Writes the shards of one source; `room`: training tokens still wanted.

    Returns the tokens per split, and whether some were left over."""
    token_format = make_tokenizer(options).format
    writers = {name: ShardWriter(prefix, name, token_format, options.shard_size, index * SHARDS_OF_A_SOURCE)
               for name in ("val", "train")}
    chunks = read_chunks(path, "text" if dataset.separator else "columns", dataset.separator)
    progress = Progress(os.path.getsize(path) if dataset.separator else None, f"{os.path.basename(path)}: ")
    splitter = Splitter(options)
    cut = False
    try:
        for result in encode_all(chunks, options):
            for drawn, packed in splitter.divide(result.parts):
                name = split or drawn
                left = room - writers["train"].count if name == "train" else len(packed)
                cut = left * token_format.width < len(packed)
                writers[name].append(packed[:left * token_format.width])
                if cut:
                    break   # more than requested
            progress.add(result.chunk_bytes, sum(len(part.packed) for part in result.parts) // token_format.width)
            if cut:
                break
        progress.clear()
        for writer in writers.values():
            if writer.shards > SHARDS_OF_A_SOURCE:
                raise DataError(f"{path} yields {writer.shards} shards, over {SHARDS_OF_A_SOURCE}: raise --shard-size")
        publish(writers.values())
    finally:
        progress.clear()
        for writer in writers.values():
            writer.discard()
    return {**{name: writer.count for name, writer in writers.items()}, "cut": cut}


def read_json(path):
    """None if there is no such file."""
    try:
        with open(path) as file:
            return json.load(file)
    except FileNotFoundError:
        return None


def write_json(path, value):
    with replacing(path) as file:
        json.dump(value, file)


def claim(prefix, options):
    """Records the settings of the shards under `prefix`. DataError: shards with other settings exist."""
    path = f"{prefix}.prepare.json"
    settings = {name: getattr(options, name) for name in ("dataset", "config", "tokenizer", "shard_size")}
    settings["val_fraction"] = options.draw.fraction
    found = read_json(path)
    if found is None and existing_shards(prefix):
        raise DataError(f"{existing_shards(prefix)[0]} exists already, not from prepare.py; give another --out")
    if found not in (None, settings):
        raise DataError(f"{path}: these shards were made with {found}, not {settings}; give another --out")
    write_json(path, settings)


def prepare(options):
    dataset = DATASETS[options.dataset]
    base = (options.base_url or dataset.base).rstrip("/")
    prefix = options.out or os.path.join(os.path.dirname(os.path.abspath(__file__)), options.dataset, options.dataset)
    folder = os.path.dirname(prefix) or "."
    os.makedirs(folder, exist_ok=True)
    tokenizer = make_tokenizer(options)   # fail before downloading if it is unusable
    with locked(f"{prefix}.lock"):
        claim(prefix, options)
        if dataset.listing:
            sources = [(None, url) for url in list_parquet(dataset, base, CONFIGS[options.config])]
        else:
            sources = [("val", f"{base}/{name}") for name in dataset.val]
            sources += [("train" if dataset.val else None, f"{base}/{name}") for name in dataset.train]
        every = 1 << 62
        wanted = options.tokens or every
        have = {"train": 0, "val": 0}
        for index, (split, url) in enumerate(sources):
            if have["train"] >= wanted:
                break
            marker = f"{prefix}.done-{index:04}.json"
            record = read_json(marker)
            room = wanted - have["train"]
            if record is None or (record["cut"] and record["train"] < room):
                print(f"source {index + 1} of {len(sources)}: {url}", flush=True)
                path = os.path.join(folder, os.path.basename(url))
                download(url, path)
                record = tokenize_source(index, split, path, dataset, options, prefix, room)
                write_json(marker, record)
                if dataset.listing and not options.keep_downloads:   # large, and no longer needed
                    os.remove(path)
            for name in have:
                have[name] += record[name]
        write_tokenizer(tokenizer, os.path.join(folder, "gpt2_tokenizer.bin"))
    if have["train"] < (options.tokens or 0):
        print(f"notice: the whole dataset has {have['train']:,} training tokens, fewer than {options.tokens:,}")
    for name in ("train", "val"):
        print(f"{name:6} {have[name]:,} tokens in {prefix}_{name}_*.bin")


def main(arguments):
    parser = Parser(prog="prepare.py", allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
                    description="Downloads a dataset and tokenizes it to shards:\n" +
                    "\n".join(f"  {name:12} {dataset.about}" for name, dataset in DATASETS.items()))
    parser.add_argument("dataset", choices=DATASETS)
    parser.add_argument("--tokens", type=count, metavar="N", help="stop after N training tokens (default: all)")
    parser.add_argument("--config", choices=CONFIGS, default="sample-10BT", help="which part of fineweb-edu")
    parser.add_argument("--out", metavar="PREFIX", help="first part of the shards' names (default: data/NAME/NAME)")
    parser.add_argument("--tokenizer", default="gpt2", help="'gpt2' (the default), a .tiktoken file, a tokenizer.json, 'bytes'")
    parser.add_argument("--eot", metavar="TOKEN", help="end-of-text token of the tokenizer.json, if unusual")
    parser.add_argument("--shard-size", type=count, default=10**8, metavar="N", help="tokens per shard (default: 1e8)")
    parser.add_argument("--workers", type=count, default=len(os.sched_getaffinity(0)), metavar="N",
                        help="processes (default: one per core)")
    parser.add_argument("--base-url", metavar="URL", help="another server with the same paths")
    parser.add_argument("--keep-downloads", action="store_true", help="keep the parquet files of fineweb-edu")
    options = parser.parse_args(arguments)
    dataset = DATASETS[options.dataset]
    options.split_on, options.json_field = dataset.separator, "text"
    options.draw = Draw.of(dataset.val_fraction, 0, None)
    prepare(options)


if __name__ == "__main__":
    run_program("prepare.py", main)
