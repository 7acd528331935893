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
import contextlib
import dataclasses
import hashlib
import http.client
import json
import os
import re
import sys
import time
import typing
import urllib.error
import urllib.request

sys.dont_write_bytecode = True   # data/ holds data
from documents import Draw, read_chunks   # noqa: E402
from programs import DataError, locked, replacing, run_program, writing   # noqa: E402
from text_tokenizers import make_tokenizer   # noqa: E402
from tokenize_text import Parser, Progress, Splitter, count, encode_all   # noqa: E402
from token_shards import ShardWriter, existing_shards, publish   # noqa: E402
from write_tokenizer import vocabulary_table, write_tokenizer   # noqa: E402

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
    except ValueError as error:
        raise DataError(f"{url}: {error}; expected a URL that begins with https:// or http://; check --base-url") from None


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


def download(url, path, sha256=None):
    """Downloads the file at `path` unless it exists; resumes from PATH.part. sha256: of the whole file, if known."""
    part, tag = path + ".part", path + ".part.etag"   # the version that PATH.part is of, if the server says it

    def size():
        return os.path.getsize(part) if os.path.exists(part) else 0

    def rest():
        have, headers = size(), {}
        if have:
            headers["Range"] = f"bytes={have}-"
            if version := read_text(tag):
                headers["If-Range"] = version
        with fetch(url, headers) as response:
            resumed = response.status == 206
            total = int(response.headers.get("Content-Length", -1)) + (have if resumed else 0)
            with writing(part):
                file = open(part, "ab" if resumed else "wb", buffering=0)   # nothing is left to write when it is closed
            with file:
                if not resumed:   # the bytes of another version are gone
                    version = response.headers.get("ETag", "")
                    with writing(tag), open(tag, "w") as record:
                        record.write("" if version.startswith("W/") else version)
                progress = Progress(total if total > 0 else None, f"{os.path.basename(path)}: ")
                progress.skip(file.tell())
                while block := memoryview(response.read(1 << 18)):
                    progress.add(len(block), 0)
                    with writing(part):
                        while block:
                            block = block[file.write(block):]
                progress.clear()
                done = file.tell()
        if 0 <= total != done:
            raise OSError(f"the connection ended after {done:,} of {total:,} bytes")

    with locked(path + ".lock"):
        if os.path.exists(path):
            return
        try:
            with_retries(url, rest, size)
        except PastTheEnd as error:
            if str(error) != str(size()):   # else it ended between the last byte and the new name
                os.remove(part)
                with_retries(url, rest, size)
        with open(part, "rb") as file:
            with writing(part):
                os.fsync(file.fileno())
            found = sha256 and digest(file)
        if found == sha256:
            os.replace(part, path)
        for file in (part, tag):
            with contextlib.suppress(FileNotFoundError):
                os.remove(file)
        if found != sha256:
            raise DataError(f"{url}: downloaded with SHA-256 {found}, expected {sha256} as listed; it was removed: try again")


def digest(file):
    """SHA-256 of the rest of a file."""
    sha256 = hashlib.sha256()
    while block := file.read(1 << 20):
        sha256.update(block)
    return sha256.hexdigest()


class Source(typing.NamedTuple):
    """A file to download."""
    split: str           # None: its documents are drawn
    url: str             # relative to the base
    file: str            # its name here
    sha256: str = None   # if the server lists it


def list_sources(dataset, base, config):
    """The sources in their order."""
    if not dataset.listing:
        train = "train" if dataset.val else None
        return [Source(split, url, os.path.basename(url)) for split, urls in (("val", dataset.val), (train, dataset.train))
                for url in urls]
    return [Source(None, f"datasets/HuggingFaceFW/fineweb-edu/resolve/main/{path}", path.replace("/", "--"), sha256)
            for path, sha256 in list_parquet(f"{base}/{dataset.listing.format(config=config)}?recursive=true")]


def list_parquet(first):
    """Path and SHA-256 (None: not given) of the parquet files, sorted, from the Hugging Face API."""
    url, files = first, {}
    while url:   # paginated
        def page(url=url):
            with fetch(url) as response:
                return response.read(), response.headers.get("Link", "")
        body, link = with_retries(url, page)
        try:
            files |= {entry["path"]: (entry.get("lfs") or {}).get("oid") for entry in json.loads(body)
                      if entry["path"].endswith(".parquet")}
        except (ValueError, TypeError, KeyError, AttributeError):
            raise DataError(f"{url}: found {body[:40]!r}..., expected a JSON list of files, as Hugging Face's API gives it; "
                            "--base-url sets another server") from None
        more = re.search(r'<([^>]+)>; *rel="next"', link)
        url = more[1] if more else None
    if not files:
        raise DataError(f"no parquet file listed at {first}")
    return sorted(files.items())


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
                if writers[name].shards > SHARDS_OF_A_SOURCE:
                    raise DataError(f"{path} yields more than {SHARDS_OF_A_SOURCE} shards of {options.shard_size:,} tokens: "
                                    "raise --shard-size, and give another --out")
                if cut:
                    break   # more than requested
            progress.add(result.chunk_bytes, sum(len(part.packed) for part in result.parts) // token_format.width)
            if cut:
                break
        progress.clear()
        publish(writers.values())
    finally:
        progress.clear()
        for writer in writers.values():
            writer.discard()
    return {**{name: writer.count for name, writer in writers.items()}, "cut": cut}


def read_text(path):
    """None if there is no such file."""
    try:
        with open(path) as file:
            return file.read()
    except FileNotFoundError:
        return None


def read_json(path):
    """None if there is no such file."""
    text = read_text(path)
    return None if text is None else json.loads(text)


def write_json(path, value):
    with replacing(path) as file:
        json.dump(value, file)


def read_record(marker, source):
    """What is recorded of a source; None: it is not finished. DataError: another file had its number."""
    record = read_json(marker)
    found = source.url if record is None else record.get("url", source.url)   # earlier versions did not record it
    if found != source.url:
        raise DataError(f"{marker}: made of {found}, but the file of this number is now {source.url}; give another --out to "
                        "tokenize the files that the server now lists")
    return record


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


@contextlib.contextmanager
def claimed(prefix, options):
    """Makes the folder of `prefix`, locks and claims it. If nothing else is there after a failure, it is removed."""
    folder = os.path.dirname(prefix) or "."
    made = not os.path.isdir(folder)
    os.makedirs(folder, exist_ok=True)
    try:
        with locked(f"{prefix}.lock"):
            claim(prefix, options)
            try:
                yield folder
            except BaseException:
                own = {os.path.basename(prefix) + ending for ending in (".lock", ".prepare.json")}
                if made and set(os.listdir(folder)) == own:
                    os.remove(f"{prefix}.prepare.json")
                raise
    except BaseException:
        if made:
            with contextlib.suppress(OSError):   # it is not empty
                os.rmdir(folder)
        raise


def prepare(options):
    prefix = options.out or os.path.join(os.path.dirname(os.path.abspath(__file__)), options.dataset, options.dataset)
    tokenizer = make_tokenizer(options)   # fail before downloading if it is unusable
    try:
        table = vocabulary_table(tokenizer)
    except DataError as error:
        if not tokenizer.for_trainer:
            raise
        table = None
        print(f"notice: {error}; no gpt2_tokenizer.bin is written: the trainer reads --tokenizer {options.tokenizer} itself")
    with claimed(prefix, options) as folder:
        have = prepare_sources(options, prefix, folder)
        if table:
            write_tokenizer(table, os.path.join(folder, "gpt2_tokenizer.bin"))
    if options.tokens and have["train"] < options.tokens:
        print(f"notice: the whole dataset has {have['train']:,} training tokens, fewer than {options.tokens:,}")
    elif options.tokens and have["train"] > options.tokens:
        print(f"notice: earlier runs wrote {have['train']:,} training tokens, more than {options.tokens:,}; give another --out "
              "for fewer")
    for name in ("train", "val"):
        print(f"{name:6} {have[name]:,} tokens in {prefix}_{name}_*.bin")


def prepare_sources(options, prefix, folder):
    """Writes the shards of all sources; returns the tokens per split, with those of earlier runs."""
    dataset = DATASETS[options.dataset]
    base = (options.base_url or dataset.base).rstrip("/")
    sources = list_sources(dataset, base, CONFIGS[options.config])
    markers = [f"{prefix}.done-{index:04}.json" for index in range(len(sources))]
    records = list(map(read_record, markers, sources))
    room = options.tokens or 1 << 62
    for index, source in enumerate(sources):
        if room <= 0:
            break
        record = records[index]
        if record is None or (record["cut"] and record["train"] < room):
            url, path = f"{base}/{source.url}", os.path.join(folder, source.file)
            print(f"source {index + 1} of {len(sources)}: {url}", flush=True)
            download(url, path, source.sha256)
            counts = tokenize_source(index, source.split, path, dataset, options, prefix, room)
            records[index] = record = {"url": source.url, **counts}
            write_json(markers[index], record)
            if dataset.listing and not options.keep_downloads:   # large, and no longer needed
                os.remove(path)
        room -= record["train"]
    return {name: sum(record[name] for record in records if record) for name in ("train", "val")}


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
