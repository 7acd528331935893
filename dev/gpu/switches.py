#!/usr/bin/env python3
"""How many tokens a second each switch of a GPU run gains or costs. dev/gpu/check.sh switches runs it.

    python3 dev/gpu/switches.py [--model gpt2:124M] [--out FILE]

Each switch is measured between two runs without it, of the same model and batch, and compared with their mean, so that
a GPU that slows down as it warms up counts against neither. A run's figure is the median of its steps, without the first
ones. Prints a table in Markdown, and writes what there is of it after every row; which way a default should be is the sign of the
gain, if that is larger than what two runs without the switch differ by. A switch that is refused here, or fails, is named
in the table, with the reason. Exit status 1: a run failed.
"""
import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.append(f"{ROOT}/dev")
from train_files import read_steps, write_shard   # noqa: E402

SWITCHES = ["--gelu cublaslt", "--residual cublaslt", "--tune-matmul", "--tune-matmul --gelu cublaslt --residual cublaslt",
            "--cuda-graphs off", "--head-chunks 1",
            "--recompute norm", "--attention cudnn", "--products fp8-block"]
FIRST = 5   # steps that are not counted


class Refused(Exception):
    """A switch that this GPU or this build does not have, with the reason."""


class Failed(Exception):
    """A run that should have ended well, with the reason."""


def run(o, options):
    """Tokens a second."""
    folder = f"{o.folder}/switch"
    shutil.rmtree(folder, ignore_errors=True)
    shape = ["--n-layer", "2", "--n-embd", "64", "--n-head", "1", "-b", "1", "-t", "16", "-d", "16"] if o.small else [
        "-b", str(o.batch_size), "-t", "1024", "-d", str(o.batch_size * 1024)]
    command = ["./train_gpt", "-i", o.data, "--model", o.model, "--from-scratch", "--vocab-size", str(o.vocabulary), "--dtype",
               "bf16", "--device", o.device, "--local-ranks", "1", *shape, "-x", str(o.steps), "--sample-every", "0",
               "--checkpoint-every", "0", "--log-every", "1", "-o", folder, *options.split()]
    print("+", *command, flush=True)
    result = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if result.returncode != 0:
        error = (result.stderr.strip().splitlines() or [f"status {result.returncode}"])[-1]
        if result.returncode == 1 and options and options.split()[0] in error:
            raise Refused("refused: " + error.removeprefix("train_gpt: "))
        raise Failed(f"failed{'' if options else ' without a switch'}: status {result.returncode}: {error}")
    return statistics.median(line["tokens_per_s"] for line in read_steps(f"{folder}/metrics.jsonl")[FIRST:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2:124M")
    parser.add_argument("--batch-size", type=int, default=64, help="sequences of 1,024 tokens")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--device", default="cuda", help="cpu: try this script without a GPU")
    parser.add_argument("--small", action="store_true", help="a tiny model, for an emulated GPU")
    parser.add_argument("--folder", default="build/gpu-runs")
    parser.add_argument("--out", help="also write the table to this file")
    o = parser.parse_args()
    if o.steps <= FIRST:
        parser.error(f"--steps {o.steps}: the first {FIRST} are not counted")
    os.makedirs(o.folder, exist_ok=True)
    o.data = f"{o.folder}/switches.bin"
    o.vocabulary = 257 if o.small else 50257
    write_shard(o.data, (i * 7919 % o.vocabulary for i in range(100_000)), o.vocabulary)
    rows, plain, failed = ["| switch | tokens/s without | with | gain |", "| --- | ---: | ---: | ---: |"], [], 0
    try:
        plain.append(run(o, ""))
    except Failed as reason:
        print("note:", reason)
        return 1
    print(*rows, sep="\n", flush=True)
    for switch in SWITCHES:
        try:
            figure = run(o, switch)
            plain.append(run(o, ""))
            without = (plain[-2] + plain[-1]) / 2
            rows.append(f"| `{switch}` | {without:,.0f} | {figure:,.0f} | {100 * (figure / without - 1):+.1f}% |")
        except (Refused, Failed) as reason:
            rows.append(f"| `{switch}` | | | {reason} |")
            failed += isinstance(reason, Failed)
        print(rows[-1], flush=True)
        spread = 100 * max((abs(b / a - 1) for a, b in zip(plain, plain[1:])), default=0)
        noise = f"two runs without a switch differ by at most {spread:.1f}%"
        if o.out:
            with open(o.out, "w") as file:
                print(f"{time.strftime('%Y-%m-%d')}, {o.model}, {o.steps} steps of bf16; {noise}", "", *rows, sep="\n",
                      file=file)
    print(f"note: {len(SWITCHES)} switches, {len(SWITCHES) - len(plain) + 1 - failed} refused here, {failed} failed; {noise}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
