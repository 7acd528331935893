#!/usr/bin/env python3
"""Random recipes: the samples that ./train_gpt --print-samples names, step by step, beside what the recipe says.

    python3 test/scripts/python/check_recipes.py [--recipes 50] [--seed 1] [--trainer ./train_gpt]

Knows nothing of how the trainer chooses samples: it steps through the stages, counts, and looks at what was read.
Checked at every step: tokens of the step, length, stage, learning rate of constant and linear stages; each source's
count within its bound of its weight since the mix began; no token of an epoch read twice or left out, in blocks of the
longest sequence; padding only where a longer length begins. Exit status: 0 all hold, 1 with the first that does not.
"""
import argparse
import json
import math
import os
import random
import struct
import subprocess
import sys
import tempfile

NAMES = "web", "code", "math", "books", "wiki"


def write_shard(path, tokens):
    with open(path, "wb") as shard:
        shard.write(struct.pack("<256i", 20240520, 1, tokens, *[0] * 253))
        shard.write(bytes(2 * tokens))


def draw(rng, folder):
    """A recipe, the tokens of each source's files, and the lines of its stages as JSON."""
    longest = rng.choice((16, 24, 64, 96))
    lengths = [T for T in range(1, longest + 1) if longest % T == 0 and T >= 4]
    sources = NAMES[:rng.randint(1, len(NAMES))]
    files = {name: [rng.randint(longest + 1, 40 * longest) for _ in range(rng.randint(1, 3))] for name in sources}
    for name, sizes in files.items():
        for i, tokens in enumerate(sizes):
            write_shard(f"{folder}/{name}_{i}.bin", tokens)
    stages = []
    for number in range(rng.randint(1, 5)):
        T = longest if number == 0 else rng.choice(lengths)
        batch = rng.choice((1, 2, 3))
        micro = T * batch
        stage = {"name": f"s{number}", "seq-len": T, "batch-size": batch, "lr": rng.choice((1.0, 0.25)),
                 "lr-schedule": rng.choice(("constant", "linear"))}
        if rng.random() < 0.5:
            stage["tokens"] = rng.randint(1, 60 * micro)
        else:
            stage["steps"] = rng.randint(1, 25)
        ramp = rng.random()
        if ramp < 0.3:
            stage["batch-ramp"] = [[0, micro]] + [[at, micro * rng.randint(1, 6)]
                                                  for at in sorted(rng.sample(range(1, 40 * micro), rng.randint(1, 3)))]
        elif ramp < 0.5:
            stage["total-batch-size"] = 8 * micro
            stage["batch-doubling"] = {"from": micro, "every": rng.randint(1, 12 * micro)}
        else:
            stage["total-batch-size"] = micro * rng.randint(1, 5)
        if rng.random() < 0.7:
            mix = rng.sample(sources, rng.randint(1, len(sources)))
            stage["data"] = {name: rng.choice((1, 2, 0.3, 0.01)) for name in mix}
        stages.append(stage)
    return sources, files, stages, longest


def steps_of(stages):
    """(stage, tokens, tokens done in the stage before it, first of its stage) of every step."""
    for number, stage in enumerate(stages):
        ramp = stage.get("batch-ramp")
        if "batch-doubling" in stage:
            ramp, at, size = [], 0, stage["batch-doubling"]["from"]
            while size <= stage["total-batch-size"]:
                ramp.append([at, size])
                at, size = at + stage["batch-doubling"]["every"], 2 * size
        ramp = ramp or [[0, stage["total-batch-size"]]]
        done = steps = 0
        while done < stage["tokens"] if "tokens" in stage else steps < stage["steps"]:
            tokens = [size for begin, size in ramp if begin <= done][-1]
            yield number, tokens, done
            done, steps = done + tokens, steps + 1


class Source:
    """What was read of one source."""

    def __init__(self, blocks, longest):
        self.blocks, self.longest = blocks, longest
        self.seen, self.block, self.at, self.epochs = set(), None, 0, 0

    def read(self, block, begin, targets, T):
        if self.block is None:
            if block in self.seen or not 0 <= block < self.blocks:
                raise AssertionError(f"block {block} of {self.blocks} again in an epoch")
            self.block, self.at = block, 0
        if (block, begin) != (self.block, self.at):
            raise AssertionError(f"read token {begin} of block {block}, not {self.at} of {self.block}")
        if targets != T - begin % T:
            raise AssertionError(f"{targets} targets from token {begin} of a block, in samples of {T}")
        self.at += targets
        if self.at == self.longest:
            self.seen.add(self.block)
            self.block = None
            if len(self.seen) == self.blocks:
                self.seen, self.epochs = set(), self.epochs + 1


def check(trainer, seed):
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        sources, files, stages, longest = draw(rng, folder)
        with open(f"{folder}/recipe.json", "w") as recipe:
            json.dump({"stage": stages}, recipe)
        weights = {name: rng.choice((0.1, 1, 2.5)) for name in sources}
        expected = list(steps_of(stages))
        command = [trainer, "--model", "d1", "--stages", f"{folder}/recipe.json", "--seed", str(seed),
                   "--print-samples", f"1-{len(expected)}", "--local-ranks", "1"]
        for name in sources:
            command += ["--data", f"{name}={folder}/{name}_*.bin:{weights[name]}"]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise AssertionError(f"{' '.join(command)}: {result.stderr}")
        found = [json.loads(line) for line in result.stdout.splitlines()]
        beyond = subprocess.run(command[:-2 - 2 * len(sources)] + command[-2 * len(sources):] +
                                ["--print-samples", f"1-{len(expected) + 1}"], capture_output=True, text=True)
        if beyond.returncode != 1 or f"has steps 1 to {len(expected)}" not in beyond.stderr:
            raise AssertionError(f"the run has other steps than {len(expected)}: {beyond.stderr}")
        readers = {name: Source(sum((tokens - 1) // longest for tokens in files[name]), longest) for name in sources}
        lengths = {number: 0 for number in range(len(stages))}
        for number, tokens, _ in expected:
            lengths[number] += tokens
        first = {}
        mix, counts = None, {}
        for step, (number, tokens, done) in enumerate(expected, 1):
            stage, line = stages[number], found[step - 1]
            T = stage["seq-len"]
            first.setdefault(number, tokens)
            if (line["step"], line["stage"], line["seq_len"], line["tokens_per_step"]) != (step, number + 1, T, tokens):
                raise AssertionError(f"step {step} is {line}, expected stage {number + 1}, {tokens} tokens in {T}")
            rate = stage["lr"]
            if stage["lr-schedule"] == "linear" and lengths[number] > first[number]:
                rate *= 1 - (done + tokens - first[number]) / (lengths[number] - first[number])
            if abs(line["lr"] - rate) > 1e-12:
                raise AssertionError(f"step {step} has rate {line['lr']}, expected {rate}")
            now = stage.get("data", weights)
            whole = sum(now.values())
            shares = {name: now.get(name, 0) / whole for name in sources}
            if mix is None or any(abs(mix[name] - shares[name]) > 1e-9 for name in sources):
                mix, counts = shares, {name: 0 for name in sources}
            if len(line["samples"]) != tokens // T:
                raise AssertionError(f"step {step} has {len(line['samples'])} samples, expected {tokens // T}")
            for name, block, begin, targets in line["samples"]:
                readers[name].read(block, begin, targets, T)
                counts[name] += 1
            samples = sum(counts.values())
            bound = 1 if len(sources) == 2 else math.log2(len(sources)) / 2 + 1
            for name in sources:
                if abs(counts[name] - shares[name] * samples) > bound:
                    raise AssertionError(f"step {step}: {counts[name]} of {samples} samples are of {name}, whose share "
                                         f"is {shares[name]}")
        return len(expected), sum(reader.epochs for reader in readers.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--recipes", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--trainer", default="./train_gpt")
    asked = parser.parse_args()
    steps = epochs = 0
    for seed in range(asked.seed, asked.seed + asked.recipes):
        try:
            of_this = check(os.path.abspath(asked.trainer), seed)
        except AssertionError as fault:
            sys.exit(f"check_recipes: {fault}\n--seed {seed} --recipes 1 repeats it")
        steps, epochs = steps + of_this[0], epochs + of_this[1]
    print(f"check_recipes: ok, {asked.recipes} recipes of {steps} steps, {epochs} epochs of sources")


if __name__ == "__main__":
    main()
