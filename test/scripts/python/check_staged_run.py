#!/usr/bin/env python3
"""A run of three stages (mix, sequence lengths, batch ramp, learning rates) beside the same in PyTorch.

    python3 test/scripts/python/check_staged_run.py [--trainer ./train_gpt] [--layout '--local-ranks 2']

PyTorch computes the whole run from the model's first weights, with its own AdamW and rates computed here; of the trainer
it takes only which samples a step has (--print-samples, which check_recipes.py checks). Then, from the trainer's
checkpoint at the end of every stage, the first loss of the next one. Exit status: 0 all agree, 1 with the difference.
Needs torch and transformers.
"""
import argparse
import json
import math
import os
import random
import shlex
import struct
import subprocess
import sys
import tempfile

import torch
from transformers import AutoModelForCausalLM, GPT2Config
from transformers.utils import logging

from check_recipes import steps_of

STAGES = [
    {"name": "main", "tokens": 4000, "seq-len": 8, "batch-size": 4, "batch-ramp": [[0, 64], [800, 128], [2000, 256]],
     "data": {"web": 0.7, "code": 0.3}, "lr": 3e-3, "lr-schedule": "constant", "warmup": 600},
    {"name": "anneal", "tokens": 2000, "seq-len": 8, "batch-size": 4, "total-batch-size": 192,
     "data": {"web": 1, "code": 1, "math": 2}, "lr": 3e-3, "lr-schedule": "linear", "final-lr-frac": 0.1},
    {"name": "long", "steps": 8, "seq-len": 32, "batch-size": 2, "total-batch-size": 256,
     "data": {"code": 2, "math": 1}, "lr": 5e-4, "lr-schedule": "1-sqrt"},
]
MODEL = GPT2Config(vocab_size=211, n_positions=32, n_embd=24, n_layer=2, n_head=4)   # tp 2, cp 2 and pp 2 divide it
FIRST, LAST = 1e-6, 1e-4   # largest differences of losses: of a stage's first step, and at the end
BETAS, EPS, DECAY, CLIP = (0.9, 0.95), 1e-8, 0.1, 1.0


def write_shard(path, tokens, seed):
    rng, shard = random.Random(seed), [0]
    while len(shard) < tokens:   # the next token is often the last one's successor, so that there is something to learn
        shard.append((shard[-1] + 1) % 200 if rng.random() < 0.7 else rng.randrange(200))
    with open(path, "wb") as file:
        file.write(struct.pack("<256i", 20240520, 1, tokens, *[0] * 253))
        file.write(struct.pack(f"<{tokens}H", *shard))
    return shard


def rate(stage, done, tokens, first, length):
    """Of the step that ends `done + tokens` tokens into a stage of `length`, whose first step has `first`."""
    at, warmup = done + tokens, stage.get("warmup", 0)
    if at < warmup:
        return stage["lr"] * at / warmup
    begin = max(first, warmup)
    if stage["lr-schedule"] == "constant" or at <= begin:
        return stage["lr"]
    share, lowest = (at - begin) / (length - begin), stage["lr"] * stage.get("final-lr-frac", 0)
    left = 1 - share if stage["lr-schedule"] == "linear" else 1 - math.sqrt(share)
    return lowest + left * (stage["lr"] - lowest)


def batch_of(line, shards, longest):
    """Inputs and labels (samples, T) of a step; what a sample lacks at its end is padding."""
    T, inputs, labels = line["seq_len"], [], []
    for name, block, begin, targets in line["samples"]:
        at = block * longest + begin
        tokens = shards[name][at:at + targets + 1]
        inputs.append(tokens[:targets] + [0] * (T - targets))
        labels.append(tokens[1:] + [-100] * (T - targets))
    return torch.tensor(inputs), torch.tensor(labels)


def loss_of(model, batch):
    inputs, labels = batch
    logits = model(inputs).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def load(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()   # without dropout


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--trainer", default="./train_gpt")
    parser.add_argument("--layout", default="")
    asked = parser.parse_args()
    logging.set_verbosity_error()
    torch.manual_seed(1)
    longest = max(stage["seq-len"] for stage in STAGES)
    with tempfile.TemporaryDirectory() as folder:
        shards = {name: write_shard(f"{folder}/{name}.bin", tokens, seed)
                  for seed, (name, tokens) in enumerate((("web", 5000), ("code", 2500), ("math", 1200)))}
        with open(f"{folder}/recipe.json", "w") as recipe:
            json.dump({"stage": STAGES}, recipe)
        AutoModelForCausalLM.from_config(MODEL).save_pretrained(f"{folder}/model")
        common = [os.path.abspath(asked.trainer), "--model", f"{folder}/model", "--stages", f"{folder}/recipe.json",
                  "--threads", "2"]
        for name in shards:
            common += ["--data", f"{name}={folder}/{name}.bin:1"]
        common += shlex.split(asked.layout)

        def run(*more):
            result = subprocess.run([*common, *more], capture_output=True, text=True)
            if result.returncode:
                sys.exit(f"check_staged_run: {result.stderr}")
            return result.stdout

        steps = list(steps_of(STAGES))
        samples = [json.loads(line) for line in run("--print-samples", f"1-{len(steps)}").splitlines()]
        run("--out-dir", f"{folder}/run", "--checkpoint-minutes", "0")
        ours = {}
        with open(f"{folder}/run/metrics.jsonl") as metrics:
            for line in map(json.loads, metrics):
                if line["kind"] == "train":
                    ours[line["step"]] = line

        model = load(f"{folder}/model")
        matrices = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() <= 1]
        adamw = torch.optim.AdamW([{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0}],
                                  lr=0, betas=BETAS, eps=EPS)
        lengths, first = {}, {}
        for number, tokens, _ in steps:
            lengths[number] = lengths.get(number, 0) + tokens
            first.setdefault(number, tokens)
        worst = 0
        for step, (number, tokens, done) in enumerate(steps, 1):
            line, batch = ours[step], batch_of(samples[step - 1], shards, longest)
            if done == 0:
                at = load(f"{folder}/run/step-{step - 1:06}") if step > 1 else model
                with torch.no_grad():
                    difference = abs(loss_of(at, batch).item() - line["loss"])
                print(f"stage {STAGES[number]['name']}: first loss {line['loss']:.7f}, differs by {difference:.1e}")
                if not difference <= FIRST:
                    sys.exit(f"check_staged_run: the first loss of stage {number + 1} differs by {difference}")
            lr = rate(STAGES[number], done, tokens, first[number], lengths[number])
            if abs(lr - line["lr"]) > 1e-12:
                sys.exit(f"check_staged_run: step {step} has rate {line['lr']}, expected {lr}")
            for group in adamw.param_groups:
                group["lr"] = lr
            adamw.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            adamw.step()
            worst = max(worst, abs(loss.item() - line["loss"]))
        print(f"{len(steps)} steps: losses differ by at most {worst:.1e}, from {ours[1]['loss']:.4f} to "
              f"{ours[len(steps)]['loss']:.4f}")
        if not worst <= LAST:
            sys.exit(f"check_staged_run: losses differ by {worst}")


if __name__ == "__main__":
    main()
