#!/usr/bin/env python3
"""Loads a checkpoint with transformers and computes the mean loss over the first samples of a token shard, in fp32: it
must equal the program's own validation loss on these samples.

    ./train_gpt --model DIR --val-data SHARD --seq-len 128 --batch-size 16 --val-steps 4 ...    "validation at step 0"
    python3 test/scripts/python/check_hf.py DIR SHARD --seq-len 128 --samples 64

Needs torch and transformers.
"""
import argparse

import numpy
import torch
from transformers import AutoModelForCausalLM


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", help="a checkpoint, OUT/step-000500")
    parser.add_argument("shard", help="a token shard of uint16")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--samples", type=int, default=64)
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(options.directory, dtype=torch.float32).eval()
    T = options.seq_len
    tokens = numpy.fromfile(options.shard, dtype=numpy.uint16, offset=1024).astype(numpy.int64)
    total = 0.0
    for k in range(options.samples):
        sample = torch.from_numpy(tokens[k * T:k * T + T + 1])
        with torch.no_grad():
            logits = model(sample[None, :-1]).logits[0]
        total += torch.nn.functional.cross_entropy(logits.double(), sample[1:], reduction="sum").item()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, mean loss {total / (options.samples * T):.8f}")


if __name__ == "__main__":
    main()
