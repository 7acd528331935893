#!/usr/bin/env python3
"""Runs one check of the trainer on a GPU; dev/gpu/check.sh runs them all. Exit status: 0 passed, 1 failed, 77 cannot be
tried here.

    python3 dev/gpu/check_training.py CHECK --model gpt2 --dtype fp32

against-cpu: losses and gradient norms of a short run match the CPU's to within the tolerance between two layouts.
repeat: two identical runs give the same bits. resume: a run stopped by a signal and resumed gives the bits of an
uninterrupted one. graphs: same bits with and without CUDA graphs. generate: the trained weights continue a prompt as
on the CPU. memory: what a run takes is what was planned. processes: several that share the GPU, with NCCL, give the
losses of one rank. Data: the project's own sources.
The last line begins with "note:" and has the figures.
"""
import argparse
import filecmp
import glob
import math
import os
import shutil
import signal
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.append(f"{ROOT}/dev")
from train_files import read_steps, write_shard   # noqa: E402

SMALL = ["--n-layer", "2", "--n-embd", "48", "--n-head", "2"]
MODELS = {   # the second has sizes that do not fill the widest memory accesses
    "gpt2": ["--model", "d4", "--vocab-size", "257"],
    "llama": ["--model", "smollm2:135M", "--n-layer", "3", "--n-embd", "252", "--n-head", "6", "--n-kv-head", "2",
              "--vocab-size", "257"],
    "experts": ["--model", "d4-e8", "--vocab-size", "257"]}
LAYOUTS = {   # of so many processes
    "all-reduce": lambda n: [],
    "zero-3": lambda n: ["--zero-stage", "3"],
    "tp": lambda n: ["--tp", str(n)],
    "pp": lambda n: ["--pp", str(n)],
    "cp": lambda n: ["--cp", str(n)],
    "ep": lambda n: ["--ep", str(n)]}
NOT_HERE = 77
STOPPED = 75   # exit status of a run stopped by a signal, which can be resumed
# Relative: losses at step 1 and later, gradient norms at step 1, as in --selftest. bf16 may differ by up to twice the
# difference between two runs with different micro-batches.
FP32 = (1e-6, 1e-4, 1e-5)
BF16 = (1e-3, 1e-3, 2.0**-8)


class Wrong(Exception):
    """The check failed; the reason."""


class CannotTry(Exception):
    """What is missing for this check."""


class Check:
    def __init__(self, o):
        self.o = o
        self.folder = f"{o.folder}/{o.check}-{o.model}-{o.dtype}"
        shutil.rmtree(self.folder, ignore_errors=True)
        os.makedirs(self.folder)
        self.shard = f"{self.folder}/train.bin"
        text = b"".join(open(path, "rb").read() for path in sorted(glob.glob(f"{ROOT}/llmc/**/*.*", recursive=True)))
        write_shard(self.shard, text)

    def command(self, out, device, *more):
        rows, length = (4, 16) if self.o.small else (8, 128)   # of a step
        return ["./train_gpt", "-i", self.shard, *MODELS[self.o.model], *self.small_model(), "--dtype", self.o.dtype,
                "--device", device, "--local-ranks", "1", "-b", "1" if self.o.small else "4", "-t", str(length),
                "-d", str(rows * length), "-l", "1e-3", "-u", "5", "-o", f"{self.folder}/{out}",
                *self.o.options.split(), *map(str, more)]

    def small_model(self):
        return SMALL + (["--n-kv-head", "1"] if self.o.model == "llama" else []) if self.o.small else []

    def train(self, out, device, *more, expected=0):
        self.finish(self.start(out, device, *more), expected)
        return self.metrics(out)

    def start(self, out, device, *more):
        command = self.command(out, device, *more)
        print("+", *command, flush=True)
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def finish(self, process, expected):
        _, errors = process.communicate()
        print(errors, end="", flush=True)
        if process.returncode != expected:
            raise Wrong(f"train_gpt ended with status {process.returncode}, not {expected}: "
                        f"{(errors.strip().splitlines() or [''])[-1]}")

    def metrics(self, out):
        return read_steps(f"{self.folder}/{out}/metrics.jsonl")

    def require_same(self, one, other, steps):
        """Compares losses, norms and the files of the last checkpoint bit by bit."""
        for a, b in zip(self.metrics(one), self.metrics(other), strict=True):
            for field in ("step", "loss", "grad_norm", "lr"):
                if a[field] != b[field]:
                    raise Wrong(f"step {a['step']}: {field} is {a[field]!r} in one run and {b[field]!r} in the other")
        tensors = sorted(os.path.basename(path)
                         for path in glob.glob(f"{self.folder}/{one}/step-{steps:06}/*.safetensors"))
        if not tensors:
            raise Wrong(f"the run left no checkpoint of step {steps}")
        for name in tensors:
            paths = [f"{self.folder}/{run}/step-{steps:06}/{name}" for run in (one, other)]
            if not filecmp.cmp(*paths, shallow=False):
                raise Wrong(f"{name} of step {steps} differs")
        return f"{len(self.metrics(one))} steps and {', '.join(tensors)} are the same"

    # ---- The checks ----

    def against_cpu(self):
        steps = ("-x", 20, "-l", "2e-4")   # a larger step would amplify rounding differences
        cpu, gpu = self.train("cpu", "cpu", *steps), self.train("gpu", self.o.device, *steps)
        allowed = FP32
        if self.o.dtype == "bf16":
            noise = distances(self.train("noise", "cpu", *steps, "-b", "2"), cpu)
            allowed = tuple(max(2 * n, least) for n, least in zip(noise, BF16))
        return judged(gpu, cpu, allowed)

    def repeat(self):
        steps = ("-x", self.o.steps)
        lines = self.train("one", self.o.device, *steps)
        self.train("other", self.o.device, *steps)
        first, last = lines[0]["loss"], lines[-1]["loss"]
        if not last < (1 if self.o.small else 0.75) * first:
            raise Wrong(f"the loss only went from {first:.3f} to {last:.3f}: the model does not learn")
        return f"{self.require_same('one', 'other', self.o.steps)}; loss {first:.3f} to {last:.3f}"

    def resume(self):
        steps = ("-x", self.o.steps)
        self.train("whole", self.o.device, *steps)
        process = self.start("stopped", self.o.device, *steps)
        while process.poll() is None and len(self.metrics("stopped")) < self.o.steps // 4:
            time.sleep(0.002)
        process.send_signal(signal.SIGTERM)
        self.finish(process, STOPPED)
        at = len(self.metrics("stopped"))
        self.train("stopped", self.o.device, *steps)
        return f"stopped after step {at}; {self.require_same('whole', 'stopped', self.o.steps)}"

    def graphs(self):
        for way in ("on", "off"):
            self.train(way, self.o.device, "-x", self.o.steps, "--cuda-graphs", way)
        return self.require_same("on", "off", self.o.steps)

    def generate(self):
        self.train("run", self.o.device, "-x", self.o.steps)
        texts = []
        for device in ("cpu", self.o.device):
            command = ["./train_gpt", "--generate", "--model", f"{self.folder}/run/step-{self.o.steps:06}", "--dtype",
                       self.o.dtype, "--device", device, "--temperature", "0", "--prompt", "// The ", "-g", "100"]
            print("+", *command, flush=True)
            result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace")
            if result.returncode != 0:
                raise Wrong(f"--generate ended with status {result.returncode}: {result.stderr.strip()}")
            texts.append(result.stdout)
        if texts[0] != texts[1]:
            raise Wrong(f"the CPU writes {texts[0]!r}, the GPU {texts[1]!r}")
        return f"{len(texts[0])} characters are the same"

    def memory(self):
        """Of a large model, unless --small: of a small one, libraries would take most."""
        large = [] if self.o.small else {
            "gpt2": ["--model", "gpt2:124M", "--vocab-size", "50257"],
            "llama": ["--model", "smollm2:135M", "--n-layer", "30", "--n-embd", "576", "--n-head", "9", "--n-kv-head", "3",
                      "--vocab-size", "49152"],
            "experts": ["--model", "d12-e8", "--vocab-size", "50257"]}[self.o.model] + ["-b", 8, "-t", 1024, "-d", 8192]
        before = gpu_memory_used()
        process = self.start("run", self.o.device, *large, "-x", 4, "-u", 1)
        most = before
        while process.poll() is None and before is not None:
            most = max(most, gpu_memory_used() or 0)
        self.finish(process, 0)
        with open(f"{self.folder}/run/log.txt") as file:
            found = [line.split("GPU memory", 1)[1].strip() for line in file if "GPU memory" in line]
        if not found:
            raise Wrong("log.txt has no line on the GPU's memory")
        text = found[-1] + ("" if before is None else f"; nvidia-smi: {(most - before) / 1024:.2f} GiB more at most")
        if "too little" in text:
            raise Wrong(text)
        return text

    def processes(self):
        n, steps = self.o.processes, ("-x", 5 if self.o.small else 20, "-l", "2e-4")
        if self.o.small:   # heads and layers for four
            steps += ("--n-layer", 4, "--n-head", 4)
        layout = LAYOUTS[self.o.layout](n)
        readers = n if self.o.layout in ("all-reduce", "zero-3", "ep") else 1
        rows = 1 if self.o.small else 2 if readers == 4 else 4 // readers
        started = [self.start("several", self.o.device, *steps, *layout, "-b", rows, "--rank", rank, "--world-size", n,
                              "--rendezvous", f"file:{self.folder}/meet", "--comm", "nccl") for rank in range(n)]
        errors = [process.communicate()[1] for process in started]
        for error in errors:
            print(error, end="", flush=True)
        missing = [line for error in errors for line in error.splitlines()
                   if "NCCL 2.30" in line or "built without" in line]
        if missing:
            raise CannotTry(missing[0].removeprefix("train_gpt: "))
        for rank, process in enumerate(started):
            if process.returncode != 0:
                raise Wrong(f"process {rank} ended with status {process.returncode}: "
                            f"{(errors[rank].strip().splitlines() or [''])[-1]}")
        return judged(self.metrics("several"), self.train("one", self.o.device, *steps), FP32)


def gpu_memory_used():
    """Of all GPUs, in MiB; None without nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(command, capture_output=True, text=True)
        return sum(map(float, result.stdout.split())) if result.returncode == 0 else None
    except (OSError, ValueError):
        return None


def judged(run, reference, allowed):
    """The distances in words, or Wrong."""
    found = distances(run, reference)
    text = "; ".join(f"{what} {x:.1e} (allowed {most:.1e})" for what, x, most in
                     zip(("loss at step 1", f"over {len(reference)} steps", "norm at step 1"), found, allowed))
    if not all(x <= most for x, most in zip(found, allowed)):   # false for NaN
        raise Wrong(text)
    return text


def relative(a, b):
    return math.nan if a is None or b is None else abs(a - b) / abs(b)   # JSON has null for non-finite numbers


def distances(run, reference):
    """Relative differences: of the losses at step 1 and at most, and of the gradient norms at step 1."""
    losses = [relative(a["loss"], b["loss"]) for a, b in zip(run, reference, strict=True)]
    worst = math.nan if any(map(math.isnan, losses)) else max(losses)
    return losses[0], worst, relative(run[0]["grad_norm"], reference[0]["grad_norm"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("check", choices=("against-cpu", "repeat", "resume", "graphs", "generate", "memory", "processes"))
    parser.add_argument("--model", choices=MODELS, default="gpt2")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--steps", type=int, help="of repeat, resume, graphs and generate; default: 400, "
                        "with --small 12")
    parser.add_argument("--small", action="store_true", help="for an emulated GPU")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--layout", choices=LAYOUTS, default="all-reduce")
    parser.add_argument("--device", default="cuda", help="cpu: try this script without a GPU")
    parser.add_argument("--options", default="", metavar="WORDS", help="more trainer options")
    parser.add_argument("--folder", default="build/gpu-runs")
    o = parser.parse_args()
    o.steps = o.steps or (12 if o.small else 400)
    check = Check(o)
    try:
        print("note:", getattr(check, o.check.replace("-", "_"))())
    except Wrong as reason:
        print("note:", reason)
        return 1
    except CannotTry as reason:
        print("note:", reason)
        return NOT_HERE
    shutil.rmtree(check.folder)   # failed runs are kept
    return 0


if __name__ == "__main__":
    sys.exit(main())
