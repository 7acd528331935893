"""The files that the scripts of dev/ give to ./train_gpt and get from it."""
import json
import os
import sys

sys.dont_write_bytecode = True   # data/ holds data
sys.path.append(os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "data"))
from token_shards import TokenFormat   # noqa: E402


def write_shard(path, tokens, vocabulary=257):
    """A shard of these token ids."""
    tokens, form = list(tokens), TokenFormat(vocabulary)
    with open(path, "wb") as file:
        file.write(form.header(len(tokens)) + form.pack(tokens))


def read_steps(path):
    """The finished steps in a metrics.jsonl, which may not be there yet."""
    if not os.path.exists(path):
        return []
    with open(path) as file:
        lines = [json.loads(line) for line in file if line.endswith("\n")]
    return [line for line in lines if line["kind"] == "train"]
