#!/usr/bin/env python3
"""Training steps beside PyTorch's, alternating on the same machine: tokens per second, ratios, and the trainer's time by op.

    python3 dev/bench/compare.py [--rounds 3] [--cases kjv gpt2_124M] [--out dev/results/DATE-name.md]

PyTorch runs eager and compiled, and in bf16 with autocast and with bf16 weights; its best is whichever was fastest. The
figures are medians over all timed steps of all rounds; "spread" is the distance of the quartiles over the median.
"""
import argparse
import json
import os
import platform
import statistics
import struct
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# layers, heads, channels, vocabulary, batch, sequence; steps to time in a run, ours and PyTorch's
CASES = {"kjv": (4, 4, 128, 257, 16, 128, 40), "gpt2_124M": (12, 12, 768, 50257, 4, 256, 4)}
WARMUP = 2


def run(command, **more):
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, **more)
    if result.returncode != 0:
        sys.exit(f"compare.py: error: {' '.join(command)} failed with status {result.returncode}:\n{result.stderr}")
    return result.stdout


def write_shard(path, vocab, tokens=100_000):
    with open(path, "wb") as file:
        file.write(struct.pack("<256i", 20240520, 1, tokens, *[0] * 253))
        file.write(struct.pack(f"<{tokens}H", *((i * 7919 + i // 257) % vocab for i in range(tokens))))


def ours(case, dtype, threads, folder):
    """Milliseconds of the timed steps, and the lines of the profile."""
    layers, heads, channels, vocab, batch, length, steps = CASES[case]
    shard, out = f"{folder}/{case}.bin", tempfile.mkdtemp(dir=folder)
    if not os.path.exists(shard):
        write_shard(shard, vocab)
    shape = ["--n-layer", layers, "--n-head", heads, "--n-embd", channels, "--vocab-size", vocab, "-b", batch, "-t", length]
    text = run(["./train_gpt", "-i", shard, "--model", "d12", *map(str, shape), "--dtype", dtype, "--threads", str(threads),
                "-x", str(WARMUP + steps), "-o", out, "--profile"])
    with open(f"{out}/metrics.jsonl") as file:
        milliseconds = [json.loads(line)["ms"] for line in file][WARMUP:]
    profile = text[text.index("\nops\n") + 5:].split("\nnext:")[0].splitlines()
    run(["rm", "-rf", out])
    return milliseconds, profile


def torch_variants(dtype):
    for compiled in (False, True):
        for precision in ("fp32",) if dtype == "fp32" else ("autocast", "bf16"):
            yield precision, compiled


def pytorch(case, variant, threads):
    layers, heads, channels, vocab, batch, length, steps = CASES[case]
    numbers = {"layers": layers, "heads": heads, "channels": channels, "vocab": vocab, "batch": batch, "seq-len": length,
               "threads": threads, "steps": steps, "warmup": WARMUP}
    command = [sys.executable, "dev/bench/pytorch_gpt2.py", "--precision", variant[0]]
    for name, value in numbers.items():
        command += [f"--{name}", str(value)]
    result = json.loads(run(command + ["--compile"] * variant[1]))
    return result["ms"], result["torch"]


def name_of(variant):
    return f"{'compiled' if variant[1] else 'eager'} {variant[0]}"


def spread(values):
    low, _, high = statistics.quantiles(values, n=4)
    return (high - low) / statistics.median(values)


def processor():
    with open("/proc/cpuinfo") as file:
        return next((line.split(": ")[1].strip() for line in file if line.startswith("model name")), platform.machine())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--dtypes", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", metavar="FILE", help="write the tables to this file, too")
    o = parser.parse_args()
    rows, profiles, version = [], [], ""
    with tempfile.TemporaryDirectory() as folder:
        for case in o.cases:
            for dtype in o.dtypes:
                variants = list(torch_variants(dtype))
                times, profile = {"ours": []}, []
                for round_number in range(o.rounds):
                    print(f"{case} {dtype}: round {round_number + 1} of {o.rounds}", file=sys.stderr, flush=True)
                    mine, profile = ours(case, dtype, o.threads, folder)
                    times["ours"] += mine
                    for variant in variants:
                        theirs, version = pytorch(case, variant, o.threads)
                        times.setdefault(name_of(variant), []).extend(theirs)
                    if round_number == 0 and len(variants) > 2:   # the faster of each kind goes on
                        def fastest(compiled):
                            return min((v for v in variants if v[1] == compiled),
                                       key=lambda v: statistics.median(times[name_of(v)]))
                        variants = [fastest(False), fastest(True)]
                tokens = CASES[case][4] * CASES[case][5]
                rate = {name: tokens / statistics.median(ms) * 1e3 for name, ms in times.items()}
                best = max((name for name in rate if name != "ours"), key=rate.get)
                rows.append(f"| {case} | {dtype} | {rate['ours']:,.0f} | {rate[best]:,.0f} ({best}) | "
                            f"{rate['ours'] / rate[best]:.2f} | {spread(times['ours']):.0%}, {spread(times[best]):.0%} | " +
                            ", ".join(f"{name} {r:,.0f}" for name, r in rate.items() if name not in ("ours", best)) + " |")
                profiles.append(f"{case} {dtype}\n" + "\n".join(profile))
    text = "\n".join([
        f"{time.strftime('%Y-%m-%d')}, {processor()}, {o.threads} threads, {run(['./train_gpt', '--version']).splitlines()[0]}, "
        f"PyTorch {version}; medians of {o.rounds} alternating rounds.", "",
        "| model | dtype | ours, tokens/s | PyTorch's best | ratio | spread | PyTorch otherwise |",
        "| --- | --- | --- | --- | --- | --- | --- |", *rows, "",
        "Time by op, last round:", "", "```", "\n\n".join(profiles), "```", ""])
    print(text)
    if o.out:
        with open(o.out, "w") as file:
            file.write(f"# Training steps beside PyTorch\n\n`make bench`, which runs `dev/bench/compare.py`.\n\n{text}")


if __name__ == "__main__":
    main()
