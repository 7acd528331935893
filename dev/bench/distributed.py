#!/usr/bin/env python3
"""Tokens per second of one rank and of two, as threads, by MPI and by TCP, as a table for dev/results/; then the ring
beside MPI's own collectives (dev/comm/beside_mpi.sh).

  dev/bench/distributed.py [--steps N] [--runs N] [OPTION...]     OPTIONs go to train_gpt

The forms take turns; each cell is the median over the runs of the median step. All ranks have one thread, and two ranks
do twice the work of one: what they lack of twice its speed is exchange, or memory and caches that they share.
"""
import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "dev"))
from train_files import read_steps, write_shard   # noqa: E402

SMALL = ("--model d6 --vocab-size 2048 --seq-len 256 --batch-size 2 --lr 1e-4 --threads 1 --device cpu --val-every 0 "
         "--checkpoint-every 0").split()


def started(form, options, out, data):
    """The command lines of a form's processes."""
    run = [str(ROOT / "train_gpt"), *SMALL, "--train-data", str(data), "--out-dir", str(out), *options]
    if form == "1 rank":
        return [run]
    if form == "2 threads":
        return [[*run, "--local-ranks", "2"]]
    if form == "2 by MPI":
        return [[str(ROOT / "scripts/multi_node/local_mpirun.sh"), "-n", "2", *run]]
    return [[*run, "--rank", str(rank), "--world-size", "2", "--rendezvous", f"file:{out}.meet"] for rank in range(2)]


def tokens_per_s(form, options, steps, data):
    """Of the median step, the first two left out."""
    with tempfile.TemporaryDirectory() as directory:
        out = pathlib.Path(directory) / "run"
        lines = started(form, [*options, "--max-steps", str(steps)], out, data)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TRAIN_GPT_TOKEN")}
        processes = [subprocess.Popen(line, env=environment, stdout=subprocess.DEVNULL, cwd=ROOT) for line in lines]
        if any([process.wait() != 0 for process in processes]):
            sys.exit(f"{form}: {' '.join(lines[0])} failed")
        return statistics.median(m["tokens_per_s"] for m in read_steps(out / "metrics.jsonl") if m["step"] > 2)


def main():
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--runs", type=int, default=5)
    arguments, options = parser.parse_known_args()
    if arguments.steps < 3 or arguments.runs < 1:
        parser.error(f"--steps {arguments.steps} --runs {arguments.runs}: expected 3 steps, of which the first two are left "
                     "out, and a run at least")
    version = subprocess.run([ROOT / "train_gpt", "--version"], capture_output=True, text=True, check=True).stdout
    forms = ["1 rank", "2 threads", *([] if "no MPI" in version else ["2 by MPI"]), "2 by TCP"]
    speeds = {form: [] for form in forms}
    with tempfile.TemporaryDirectory() as directory:
        data = pathlib.Path(directory) / "bench.bin"
        write_shard(data, (i * i % 2048 for i in range(200_000)))
        for run in range(arguments.runs):
            for form in forms if run % 2 == 0 else reversed(forms):
                print(f"\r{form}, run {run + 1} of {arguments.runs} ...   ", end="", file=sys.stderr, flush=True)
                speeds[form].append(tokens_per_s(form, options, arguments.steps, data))
    print(file=sys.stderr)
    one = statistics.median(speeds["1 rank"])
    print("| form | tokens/s | of 1 rank | lost to exchange and sharing | lowest and highest |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for form in forms:
        median, ranks = statistics.median(speeds[form]), int(form[0])
        print(f"| {form} | {median:.0f} | {median / one:.2f} | {1 - median / one / ranks:.1%} | "
              f"{min(speeds[form]):.0f} to {max(speeds[form]):.0f} |")


if __name__ == "__main__":
    main()
