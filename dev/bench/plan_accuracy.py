#!/usr/bin/env python3
"""How well `--plan --machine local` foresees the time of a step on this machine: models and layouts drawn by a seed, each
planned and then run; prints a table and the largest error. Needs an idle machine.

usage: dev/bench/plan_accuracy.py [SEED [MODELS]]"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.append(f"{ROOT}/dev")
from train_files import read_steps, write_shard   # noqa: E402

FAMILIES = ["d4", "d6", "d8", "d6-e4", "d6-e8", "gpt2:124M --n-layer 4", "qwen2.5:0.5B --n-layer 4", "llama3:1B --n-layer 2",
            "smollm2:135M --n-layer 6", "mixtral:8x7B --n-layer 2 --n-embd 256 --n-head 8 --n-kv-head 2 --n-ffn 512"]


def draw_model(rng):
    """A model with a micro-batch, as options."""
    tokens, batch = rng.choice([(64, 4), (128, 4), (256, 2), (256, 4), (512, 1), (512, 2), (1024, 1)])
    vocabulary = rng.choice([257, 1000, 16384])
    return (f"--model {rng.choice(FAMILIES)} --vocab-size {vocabulary} -t {tokens} -b {batch} "
            f"--dtype {rng.choice(['fp32', 'bf16'])}"), tokens * batch


def draw_layouts(rng, micro_batch):
    """One rank, two that share each sample, a pipeline, and four ranks with ZeRO."""
    schedule = rng.choice(["gpipe", "1f1b", "zb-h1"])
    return ["", rng.choice(["--cp 2", "--tp 2"]), f"--pp 2 --schedule {schedule} -d {4 * micro_batch}",
            f"--local-ranks 4 --zero-stage {rng.choice([0, 1, 2, 3])}"]


def run(command):
    """What it prints, and the reason if it fails."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    reason = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
    return done.stdout, reason[0] if done.returncode else None


def main():
    if {"-h", "--help"} & set(sys.argv):
        return print(__doc__)
    seed, models = int(sys.argv[1]) if len(sys.argv) > 1 else 1, int(sys.argv[2]) if len(sys.argv) > 2 else 5
    rng = random.Random(seed)
    errors = []
    print("| run | planned (ms) | took (ms) | error |\n| --- | --- | --- | --- |")
    for _ in range(models):
        model, micro_batch = draw_model(rng)
        for layout in draw_layouts(rng, micro_batch):
            with tempfile.TemporaryDirectory() as folder:
                shard = f"{folder}/tokens.bin"
                write_shard(shard, (rng.randrange(257) for _ in range(200_000)))
                command = f"./train_gpt {model} {layout} -i {shard} --sample-every 0".split()
                if "--local-ranks" not in command and layout:
                    command += ["--local-ranks", "2"]
                plan, refused = run(command + ["--plan", "--machine", "local", "--json"])
                if refused:
                    print(f"| `{model} {layout}` | refused: {refused} | | |", flush=True)
                    continue
                failed = run(command + ["-o", f"{folder}/out", "--max-steps", "14", "--checkpoint-every", "0",
                                        "--val-every", "0"])[1]
                if failed:
                    sys.exit(f"plan_accuracy.py: error: {' '.join(command)}: {failed}")
                planned = 1000 * json.loads(plan)["step_seconds"]
                took = statistics.median(x["ms"] for x in read_steps(f"{folder}/out/metrics.jsonl") if x["step"] >= 4)
                errors.append(planned / took - 1)
                print(f"| `{model} {layout}` | {planned:.1f} | {took:.1f} | {100 * errors[-1]:+.1f}% |", flush=True)
    if not errors:
        sys.exit("plan_accuracy.py: error: no run was both planned and made")
    print(f"\nlargest error {100 * max(map(abs, errors)):.1f}%, median {100 * statistics.median(map(abs, errors)):.1f}%, "
          f"{sum(abs(e) <= 0.15 for e in errors)} of {len(errors)} within 15%")


if __name__ == "__main__":
    main()
