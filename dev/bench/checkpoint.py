#!/usr/bin/env python3
"""What saving costs a training run on a CPU: --checkpoint-mode async and sync beside no saving at all, and PyTorch's
torch.distributed.checkpoint.async_save beside a run of its own that saves nothing. All write to the same disk.

    make bench-checkpoint                           GPT-2 124M, B 4, T 256, a checkpoint every 25 steps; 40 minutes
    SMALL=1 make bench-checkpoint                   a model of 11M parameters instead; 4 minutes
    BENCH_FLAGS='--rounds 1 --dir /mnt/disk' make bench-checkpoint

Runs alternate, and every figure is the median of all rounds: of a save, how long training stood still, how long the
files were written, and how fast; of the steps between the first save and the third, with two saves among them, how much
longer than without saves they took, in percent. What writing in the background takes from training is by how much the
steps during which files were written, without the time that training stood still, exceed as many median steps of the same
run, in percent of the steps between two saves: two runs on a shared machine differ by more than that.
"""
import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.append(f"{ROOT}/dev")
from train_files import write_shard   # noqa: E402

LARGE = {"model": "gpt2:124M", "vocab": 50257, "shape": []}
SMALL = {"model": "gpt2:124M", "vocab": 2048,
         "shape": ["--n-layer", "6", "--n-head", "6", "--n-embd", "384", "--vocab-size", "2048"]}
BATCH, LENGTH = 4, 256


def options_of(o):
    return ["--model", o.case["model"], *o.case["shape"], "--batch-size", str(BATCH), "--seq-len", str(LENGTH),
            "--train-data", o.data]


def figures(times, saves, every):
    """times: when each step had ended, in seconds. saves: stall, write and cpu seconds and bytes, of the first two."""
    step = statistics.median(after - before for before, after in zip(times, times[1:]))
    beside = []
    for number, save in enumerate(saves, start=1):
        begin = times[number * every - 1]
        count = next((n for n in range(1, every) if times[number * every - 1 + n] - begin >= save["write_s"]), every)
        beside.append(times[number * every - 1 + count] - begin - count * step - save["stall_s"])
    return {"window": times[3 * every - 1] - times[every - 1], "stall": [s["stall_s"] for s in saves],
            "beside": [100 * extra / (every * step) for extra in beside],
            "write": [s["write_s"] for s in saves], "cpu": [s["cpu_s"] for s in saves],
            "rate": [s["bytes"] / s["write_s"] / 1e6 for s in saves]}


def run_ours(mode, o, out):
    saves = ["--checkpoint-every", "0" if mode == "none" else str(o.every), "--checkpoint-minutes", "0"]
    if mode != "none":
        saves += ["--checkpoint-mode", mode, "--keep-checkpoints", "1"]
    command = ["./train_gpt", *options_of(o), "--from-scratch", "--max-steps", str(3 * o.every), "--val-every", "0",
               "--device", "cpu", "--out-dir", out, *saves]
    run(command)
    with open(f"{out}/metrics.jsonl") as file:
        lines = [json.loads(line) for line in file]
    times = [line["elapsed_s"] for line in lines if line["kind"] == "train"]
    saved = [line for line in lines if line["kind"] == "checkpoint" and line["saved"] < 3 * o.every]
    return figures(times, saved, o.every)


def run_torch(mode, o, out):
    command = [sys.executable, os.path.abspath(__file__), "--torch-run", mode, "--every", str(o.every), "--dir", out,
               "--data", o.data] + (["--small"] if o.small else [])
    result = json.loads(run(command).splitlines()[-1])
    return figures(result["times"], result["saves"], o.every)


def run(command):
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if result.returncode != 0:
        raise SystemExit(f"checkpoint.py: error: {' '.join(command)} ended with status {result.returncode}:\n"
                         f"{result.stderr.strip()[-2000:]}")
    return result.stdout


def torch_run(mode, o):
    """A run of PyTorch: prints when its steps ended, and its saves."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    import torch_train
    names = {name: int(value) for name, value in zip(o.case["shape"][::2], o.case["shape"][1::2])}
    shape = argparse.Namespace(model=o.case["model"], seq_len=LENGTH, batch_size=BATCH, device="cpu", precision="fp32",
                               lr=1e-4, **{name: names.get(f"--{name.replace('_', '-')}") for name in torch_train.SIZES})
    torch.manual_seed(0)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = torch_train.dense_model(shape)[0]
    optimizer = torch_train.Optimizer(model, shape)
    begin, times, saves, writing = time.perf_counter(), [], [], []
    stream = torch_train.batches(torch_train.read_shard(o.data), BATCH, LENGTH, "cpu")
    for step in range(1, 3 * o.every + 1):
        model(*next(stream))[0].backward()
        optimizer.step()
        times.append(time.perf_counter() - begin)
        if mode == "none" or step % o.every != 0 or step == 3 * o.every:
            continue
        start = time.perf_counter()
        if writing:
            writing[-1].result()   # one save at a time
        weights, state = get_state_dict(model, optimizer.adamw)
        save = {"bytes": sum(t.nbytes for t in tensors(weights)) + sum(t.nbytes for t in tensors(state)), "cpu_s": 0}
        future = dcp.async_save({"model": weights, "optimizer": state}, checkpoint_id=f"{o.dir}/step-{step}")
        save["stall_s"] = time.perf_counter() - start
        future.add_done_callback(lambda _, save=save, start=start: save.update(write_s=time.perf_counter() - start))
        writing.append(future)
        saves.append(save)
    for future in writing:
        future.result()
    time.sleep(0.1)   # the callback of the last one
    print(json.dumps({"times": times, "saves": saves}))


def tensors(value):
    import torch
    if isinstance(value, torch.Tensor):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
        yield from tensors(inner)


def table(results, o):
    median = statistics.median
    print(f"\n{time.strftime('%Y-%m-%d')}, {platform.node()}, {len(os.sched_getaffinity(0))} processors, "
          f"{o.case['model']} {' '.join(o.case['shape'])}: {o.rounds} round(s), a checkpoint every {o.every} steps\n")
    print("| saving | step | training stood still | written in | | processor time of writing | slower, in all | "
          "writing |\n| --- | --- | --- | --- | --- | --- | --- | --- |")
    for (program, mode), runs in results.items():
        window = median(r["window"] for r in runs)
        row = [f"{program}: {mode}", f"{1e3 * window / (2 * o.every):.0f} ms"]
        if mode == "none":
            print("| " + " | ".join(row + [""] * 6) + " |")
            continue
        alone = median(r["window"] for r in results[program, "none"])
        stall, write, rate, cpu = (median(x for r in runs for x in r[name]) for name in ("stall", "write", "rate", "cpu"))
        beside = median(x for r in runs for x in r["beside"])
        print("| " + " | ".join(row + [f"{stall:.2f} s", f"{write:.2f} s", f"{rate:.0f} MB/s",
                                       f"{cpu:.2f} s" if cpu else "", f"{100 * (window / alone - 1):+.1f}%",
                                       f"{beside:+.1f}%"]) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", default=os.environ.get("SMALL", "") not in ("", "0"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--every", type=int, default=25, help="steps between saves")
    parser.add_argument("--dir", type=os.path.abspath, help="where to write; default: a temporary directory")
    parser.add_argument("--no-torch", action="store_true", help="only this trainer")
    parser.add_argument("--torch-run", choices=("none", "async"), help=argparse.SUPPRESS)
    parser.add_argument("--data", help=argparse.SUPPRESS)
    o = parser.parse_args()
    o.case = SMALL if o.small else LARGE
    if o.torch_run:
        return torch_run(o.torch_run, o)
    ways = [("train_gpt", mode) for mode in ("none", "async", "sync")]
    if not o.no_torch:
        ways += [("PyTorch", "none"), ("PyTorch", "async")]
    results = {way: [] for way in ways}
    with tempfile.TemporaryDirectory(dir=o.dir) as directory:
        o.data = f"{directory}/train.bin"
        write_shard(o.data, ((i * 7919 + i // 257) % o.case["vocab"] for i in range(200 * BATCH * LENGTH)), o.case["vocab"])
        for number in range(o.rounds):
            for program, mode in ways:
                out = f"{directory}/run"
                os.makedirs(out)
                os.sync()   # nothing is left to write of the run before
                figure = (run_ours if program == "train_gpt" else run_torch)(mode, o, out)
                results[program, mode].append(figure)
                print(f"round {number + 1}: {program}, {mode}: {2 * o.every} steps in {figure['window']:.1f} s, stalls "
                      f"{', '.join(f'{s:.2f}' for s in figure['stall']) or 'none'} s", flush=True)
                shutil.rmtree(out)
    table(results, o)


if __name__ == "__main__":
    main()
