#!/usr/bin/env python3
"""Compares training steps with PyTorch's, alternating on one machine: tokens per second, ratios, time by op.

    python3 dev/bench/compare.py [--device cuda] [--rounds 3] [--cases NAME ...] [--out dev/results/NAME.md]

PyTorch runs compiled, and eager too on a CPU and with experts; in bf16 with autocast, and also with bf16 weights (on a
GPU with fp32 masters). The trainer runs as it is, on a GPU also with --tune-matmul. The first round picks the fastest
variant of each kind for the later rounds. SIGTERM ends it with the figures that it has. Figures are medians over all
timed steps of all rounds; "spread" is the interquartile range over the median. A case may also be a directory with a
config.json. d6-e8 and d12-e8 are sparse, and compared with transformers' Mixtral, whose experts run by the fastest of
its implementations. drawn:SEED is a GPT-2 of a shape that the seed draws. Memory: on a CPU the largest resident set in
the timed steps (ours: after a step, since it has all of it from the first step on); on a GPU the trainer's plan, and
what PyTorch allocated at most.
"""
import argparse
import dataclasses
import importlib.util
import json
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.append(f"{ROOT}/dev")
from train_files import read_steps, write_shard   # noqa: E402

WARMUP = {"cpu": 2, "cuda": 5}
LEARNING_RATE = "1e-4"


@dataclasses.dataclass(frozen=True)
class Case:
    model: str
    batch: int
    length: int
    steps: int            # timed steps per run
    shape: tuple = ()     # options that override numbers of the model
    vocab: int = 50257
    ours: tuple = ()      # options of the trainer alone
    needs: tuple = ()     # modules besides torch, for the peer


CASES = {
    "cpu": {"kjv": Case("smollm2:135M", 16, 128, 40, ("--n-layer", 4, "--n-head", 4, "--n-kv-head", 2, "--n-embd", 128,
                                                   "--n-ffn", 256, "--vocab-size", 257), 257),
            "gpt2_124M": Case("gpt2:124M", 4, 256, 4),
            "gpt2_124M_T1024": Case("gpt2:124M", 1, 1024, 4),
            "gpt2_124M_T64": Case("gpt2:124M", 4, 64, 8),
            "qwen2.5_4_layers": Case("qwen2.5:0.5B", 1, 512, 4, ("--n-layer", 4), 151936),
            # transformers' coefficient is 0.01, for a loss that is twice as large with two experts per token
            "d6-e8": Case("d6-e8", 4, 256, 8, ("--vocab-size", 4096), 4096, ("--moe-aux-loss", "0.02"),
                          ("transformers",))},
    # batches for GPUs of 120 GiB and more; halved on smaller ones
    "cuda": {"gpt2:124M": Case("gpt2:124M", 64, 1024, 20),
             "gpt2:1558M": Case("gpt2:1558M", 16, 1024, 10),
             "qwen2.5:1.5B": Case("qwen2.5:1.5B", 16, 1024, 10, vocab=151936),
             "d12-e8": Case("d12-e8", 32, 1024, 10, (), 50257, ("--moe-aux-loss", "0.02"), ("transformers",))}}


class Failed(Exception):
    """A run failed, with the reason."""


def failure(command, status, text):
    lines = text.strip().splitlines() or ["no error message"]
    reason = next((line for line in lines if line.startswith("train_gpt:")), lines[-1])   # else a Python error
    print(f"compare.py: {' '.join(command)} failed with status {status}:", *lines[-20:], sep="\n", file=sys.stderr)
    return Failed(reason)


def run(command):
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if result.returncode != 0:
        raise failure(command, result.returncode, result.stderr)
    return result.stdout


class Bench:
    def __init__(self, options, folder):
        self.o, self.folder, self.stopped = options, folder, False

    def stop(self, *_):
        """Handles SIGTERM."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)   # `timeout` sends it twice
        self.stopped = True
        raise Failed("stopped")

    def shard(self, case):
        path = f"{self.folder}/{case.vocab}.bin"
        if not os.path.exists(path):
            write_shard(path, ((i * 7919 + i // 257) % case.vocab for i in range(2_000_000)), case.vocab)
        return path

    def trainer(self, case, dtype, steps, *more):
        """The command and its output directory."""
        out = tempfile.mkdtemp(dir=self.folder)
        return ["./train_gpt", "-i", self.shard(case), "--model", case.model, *map(str, case.shape),
                "-b", str(case.batch), "-t", str(case.length), "--dtype", dtype, "--device", self.o.device,
                "--local-ranks", "1", "--threads", str(self.o.threads), "-l", LEARNING_RATE, "-k", "constant",
                "--no-shuffle", "-x", str(steps), "-o", out, *case.ours, *more], out

    def profile(self, case, dtype, steps, *more):
        """The steps of a whole run and its time by op."""
        command, out = self.trainer(case, dtype, steps, "--profile", *more)
        text = run(command)
        lines = read_steps(f"{out}/metrics.jsonl")
        shutil.rmtree(out)
        return lines, text[text.index("\nops") + 1:].split("\nnext:")[0].splitlines()

    def ours(self, case, dtype, more):
        """The steps, and on a CPU the time by op."""
        steps = WARMUP[self.o.device] + case.steps
        if self.o.device == "cpu":
            return self.profile(case, dtype, steps, *more)
        # Timing every op would slow it down, and so would a checkpoint of a large model: kill the run once it is timed.
        command, out = self.trainer(case, dtype, 1000 * steps, *more)
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            while process.poll() is None and len(read_steps(f"{out}/metrics.jsonl")) < steps:
                time.sleep(0.05)
            finished = process.poll()
        finally:
            process.kill()
            _, errors = process.communicate()
        lines = read_steps(f"{out}/metrics.jsonl")[:steps]
        shutil.rmtree(out)
        if finished is not None and len(lines) < steps:
            raise failure(command, finished, errors)
        return lines, []

    def pytorch(self, case, options):
        precision, compiled = options
        command = [sys.executable, "dev/bench/torch_train.py", "--train-data", self.shard(case), "--model", case.model,
                   *map(str, case.shape), "--batch-size", str(case.batch), "--seq-len", str(case.length), "--precision",
                   precision, "--device", self.o.device, "--threads", str(self.o.threads), "--lr", LEARNING_RATE,
                   "--warmup", str(WARMUP[self.o.device]), "--steps", str(case.steps)]
        return json.loads(run(command + ["--compile"] * compiled))

    def variants(self, case, dtype):
        """Variants by name: options of the trainer, or PyTorch's precision and whether it compiles."""
        ways = {"ours": (), "ours --tune-matmul": ("--tune-matmul",)} if self.o.device == "cuda" else {"ours": ()}
        precisions = ("fp32",) if dtype == "fp32" else ("autocast", "bf16") if self.o.device == "cpu" else \
            ("master", "autocast")   # the faster first: there may be no time left for the other
        for compiled in (False, True) if self.o.device == "cpu" or case.needs else (True,):
            ways |= {f"{'compiled' if compiled else 'eager'} {p}": (p, compiled) for p in precisions}
        chosen = {way: options for way, options in ways.items() if way in (self.o.ways or ways)}
        if len({kind_of(way) == "ours" for way in chosen}) < 2:
            raise Failed(f"--ways must name one of ours and one of PyTorch's: {', '.join(ways)}")
        return chosen

    def in_time(self, longest):
        return not self.stopped and time.monotonic() + longest < self.o.deadline


def kind_of(name):
    return name.split()[0]   # ours, eager, compiled


def spread(values):
    if len(values) < 2:
        return "?"
    low, _, high = statistics.quantiles(values, n=4)
    return f"{(high - low) / statistics.median(values):.0%}"


def compare(bench, name, case, dtype):
    """Returns a row of the table, the losses of both, and the time by op."""
    all_ways, longest, warmup = bench.variants(case, dtype), 0.0, WARMUP[bench.o.device]
    ways = all_ways
    times, losses, memory, profile, peer, reasons = {}, {}, {}, [], {}, dict.fromkeys(all_ways, "no time left")
    for round_number in range(bench.o.rounds):
        if round_number > 0 and not bench.in_time(longest):
            print(f"{name} {dtype}: no time left for round {round_number + 1}", file=sys.stderr)
            break
        print(f"{name} {dtype}: round {round_number + 1} of {bench.o.rounds}", file=sys.stderr, flush=True)
        begin, longest_run = time.monotonic(), 0.0
        for way, options in ways.items():
            if not bench.in_time(longest_run) and any(kind_of(way) == kind_of(done) for done in times):
                print(f"{name} {dtype}: no time left for {way}", file=sys.stderr)
                continue
            run_begin = time.monotonic()
            try:
                if kind_of(way) == "ours":
                    lines, profile = bench.ours(case, dtype, options)
                    milliseconds = [line["ms"] for line in lines[warmup:]]
                    losses[way] = [line["loss"] for line in lines]
                    memory[way] = max(line["memory_bytes"] for line in lines) / 2**30
                else:
                    peer = bench.pytorch(case, options)
                    milliseconds, losses[way], memory[way] = peer["ms"], peer["losses"], peer["gib"]
                times.setdefault(way, []).extend(milliseconds)
            except Failed as error:   # e.g. out of memory, where another variant may fit
                reasons[way] = error
            if bench.stopped:
                break
            longest_run = max(longest_run, time.monotonic() - run_begin)
        if round_number == 0:   # keep the fastest of each kind
            best = {}
            for way in sorted(times, key=lambda way: statistics.median(times[way])):
                best.setdefault(kind_of(way), way)
            ways = {way: all_ways[way] for way in best.values()}
        if len({kind_of(way) == "ours" for way in ways}) < 2:
            break
        longest = time.monotonic() - begin
    rate = {way: case.batch * case.length / statistics.median(ms) * 1e3 for way, ms in times.items()}
    lacking = [f"{way}: {why}" for way, why in reasons.items() if way not in rate]
    if len({kind_of(way) == "ours" for way in rate}) < 2:
        raise Failed("; ".join(lacking + [f"{way} {r:,.0f} tokens/s" for way, r in rate.items()]))
    mine = max((way for way in ways if kind_of(way) == "ours"), key=rate.get)   # those of all rounds
    theirs = max((way for way in ways if kind_of(way) != "ours"), key=rate.get)
    if bench.o.device == "cuda" and peer["parameters"] < 5e8 and bench.in_time(longest):
        try:
            _, profile = bench.profile(case, dtype, warmup + 3, *all_ways[mine])
        except Failed as error:
            profile = [f"without a profile: {error}"]
    tera = peer["flops_per_token"] * 1e-12
    row = (f"| {name} | {dtype} | {case.batch} x {case.length} | {rate[mine]:,.0f}{mine.removeprefix('ours')} | "
           f"{rate[theirs]:,.0f} ({theirs}) | {rate[mine] / rate[theirs]:.2f} | "
           f"{tera * rate[mine]:.3g}, {tera * rate[theirs]:.3g} | "
           f"{spread(times[mine])}, {spread(times[theirs])} | " +
           ", ".join([f"{way} {r:,.0f}" for way, r in rate.items() if way not in (mine, theirs)] + lacking) + " |")
    text = f"{name} {dtype}: ours {losses[mine][0]:.4f} to {losses[mine][-1]:.4f}, " \
           f"PyTorch {losses[theirs][0]:.4f} to {losses[theirs][-1]:.4f}"
    if peer["kernel_ms"]:
        text += f"; {'experts' if case.needs else 'attention'} of PyTorch by {peer['kernel']}, ms of a layer " \
                f"{peer['kernel_ms']}"
    text += f"; {memory[mine]:.2f} GiB, PyTorch {memory[theirs]:.2f}"
    if case.shape:
        text += f"; {' '.join(map(str, case.shape))}"
    return row, text, f"{name} {dtype}\n" + "\n".join(profile), peer


def processor():
    with open("/proc/cpuinfo") as file:
        return next((line.split(": ")[1].strip() for line in file if line.startswith("model name")), platform.machine())


def gpu(field):
    """Of the first GPU that programs see, while nvidia-smi sees all; "?": not known, as of a part of a GPU (MIG)."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits", *(["-i", first] if first else [])]
    try:
        return run(command).splitlines()[0].strip()
    except (Failed, IndexError):
        return "?"


def is_small():
    """Less than 120 GiB, or not known."""
    try:
        return float(gpu("memory.total")) < 120 * 1024
    except ValueError:   # "[N/A]"
        return True


def drawn_case(seed):
    if not seed.isdigit():
        sys.exit(f"compare.py: error: --cases drawn:{seed}: expected a number after the colon, such as drawn:7")
    draw = random.Random(int(seed))
    heads, size, layers = draw.randint(3, 12), draw.choice((32, 48, 64, 80, 96)), draw.randint(2, 6)
    vocab = draw.randint(2000, 50000)
    return Case("gpt2:124M", draw.randint(1, 6), 32 * draw.randint(2, 24), 6,
                ("--n-layer", layers, "--n-head", heads, "--n-embd", heads * size, "--vocab-size", vocab), vocab)


def choose_case(name, o):
    case = drawn_case(name.removeprefix("drawn:")) if name.startswith("drawn:") else CASES[o.device].get(name)
    if case is None:
        path = os.path.join(ROOT, name, "config.json")
        try:
            with open(path) as file:
                config = json.load(file)
        except OSError as error:
            sys.exit(f"compare.py: error: --cases {name}: none of {', '.join(CASES[o.device])}, nor a directory with a "
                     f"model: {path}: {error.strerror}")
        case = Case(name, 2, config.get("n_positions") or min(config["max_position_embeddings"], 1024), 4,
                    vocab=config["vocab_size"])
    elif o.device == "cuda" and is_small():
        case = dataclasses.replace(case, batch=max(1, case.batch // 2))
    return dataclasses.replace(case, **{k: v for k, v in (("batch", o.batch_size), ("steps", o.steps)) if v})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=CASES, default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", metavar="NAME",
                        help="also drawn:SEED; default: " +
                        "; ".join(f"on {device} {' '.join(c)}" for device, c in CASES.items()))
    parser.add_argument("--dtypes", nargs="+", choices=("fp32", "bf16"), help="default: both on a CPU, bf16 on a GPU")
    parser.add_argument("--ways", nargs="+", metavar="WAY", help="only these variants, such as 'compiled autocast'")
    parser.add_argument("--batch-size", type=int, help="sequences, instead of the case's")
    parser.add_argument("--steps", type=int, help="timed steps per run, instead of the case's")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no further round after this time")
    parser.add_argument("--out", metavar="FILE", help="also write the tables to this file")
    o = parser.parse_args()
    o.deadline = time.monotonic() + o.seconds
    machine = f"{processor()}, {o.threads} threads"
    if o.device == "cuda":
        if not shutil.which("nvidia-smi"):
            sys.exit("compare.py: error: --device cuda: nvidia-smi not found, so there is no GPU here")
        machine = f"{gpu('name')}, driver {gpu('driver_version')}"
    machine += f", {run(['./train_gpt', '--version']).splitlines()[0]}"
    cases = [(name, choose_case(name, o)) for name in o.cases or CASES[o.device]]
    rows, losses, profiles, version, failed = [], [], [], "", []

    def report():
        text = "\n".join([
            f"{time.strftime('%Y-%m-%d')}, {machine}, {version}; medians of up to {o.rounds} alternating rounds.", "",
            "| model | dtype | batch | ours, tokens/s | PyTorch's best | ratio | model TFLOP/s | spread | otherwise |",
            "| --- | --- | --- | --- | --- | --- | --- | --- | --- |", *rows, "",
            "Loss of the first and last step, from different initial weights, on the same data:", "",
            *(f"- {x}" for x in losses), "", "Time by op:", "", "```",
            "\n\n".join(p for p in profiles if "\n" in p.strip()), "```", *failed, ""])
        if o.out:
            with open(o.out, "w") as file:
                file.write("# Training steps compared with PyTorch\n\n`python3 dev/bench/compare.py "
                           f"{' '.join(sys.argv[1:])}`\n\n{text}")
        return text

    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(o, folder)
        signal.signal(signal.SIGTERM, bench.stop)
        for name, case in cases:
            missing = [module for module in case.needs if importlib.util.find_spec(module) is None]
            if missing:
                print(f"compare.py: {name} is left out: {sys.executable} has no {', '.join(missing)}; install with: "
                      f"{sys.executable} -m pip install {' '.join(missing)}", file=sys.stderr)
                continue
            for dtype in o.dtypes or (["fp32", "bf16"] if o.device == "cpu" else ["bf16"]):
                try:
                    row, loss, profile, peer = compare(bench, name, case, dtype)
                    rows.append(row), losses.append(loss), profiles.append(profile)
                    version = f"PyTorch {peer['torch']}" + (f", CUDA {peer['cuda']}" if o.device == "cuda" else "")
                except Failed as error:
                    print(f"compare.py: error: {name} {dtype}: {error}", file=sys.stderr)
                    failed += ["", f"{name} {dtype} failed: `{error}`"]
                report()
                if bench.stopped:
                    print(report())
                    return 1
    print(report())
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
