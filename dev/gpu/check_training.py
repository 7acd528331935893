#!/usr/bin/env python3
"""Runs one check of the trainer on a GPU; dev/gpu/check.sh runs them all. Exit status: 0 passed, 1 failed.

    python3 dev/gpu/check_training.py against-cpu|repeat|resume|graphs|generate --model gpt2 --dtype fp32

against-cpu: losses and gradient norms of a short run match the CPU's to within the tolerance between two layouts.
repeat: two identical runs give the same bits. resume: a run stopped by a signal and resumed gives the bits of an
uninterrupted one. graphs: same bits with and without CUDA graphs. generate: the trained weights continue a prompt as
on the CPU. Data: the project's own sources.
The last line begins with "note:" and has the figures.
"""
import argparse
import filecmp
import glob
import json
import math
import os
import shutil
import signal
import struct
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
MODELS = {   # the second has sizes that do not fill the widest memory accesses
    "gpt2": ["--model", "d4", "--vocab-size", "257"],
    "llama": ["--model", "smollm2:135M", "--n-layer", "3", "--n-embd", "252", "--n-head", "6", "--n-kv-head", "2",
              "--vocab-size", "257"],
    "experts": ["--model", "d4-e8", "--vocab-size", "257"]}
STOPPED = 75   # exit status of a run stopped by a signal, which can be resumed
# Relative: losses at step 1 and later, gradient norms at step 1, as in --selftest. bf16 may differ by up to twice the
# difference between two runs with different micro-batches.
FP32 = (1e-6, 1e-4, 1e-5)
BF16 = (1e-3, 1e-3, 2.0**-8)


class Wrong(Exception):
    """The check failed; the reason."""


class Check:
    def __init__(self, o):
        self.o = o
        self.folder = f"{o.folder}/{o.check}-{o.model}-{o.dtype}"
        shutil.rmtree(self.folder, ignore_errors=True)
        os.makedirs(self.folder)
        self.shard = f"{self.folder}/train.bin"
        text = b"".join(open(path, "rb").read() for path in sorted(glob.glob(f"{ROOT}/llmc/**/*.*", recursive=True)))
        with open(self.shard, "wb") as file:
            file.write(struct.pack("<256i", 20240520, 1, len(text), *[0] * 253))
            file.write(struct.pack(f"<{len(text)}H", *text))

    def command(self, out, device, *more):
        return ["./train_gpt", "-i", self.shard, *MODELS[self.o.model], "--dtype", self.o.dtype, "--device", device,
                "--local-ranks", "1", "-b", "4", "-t", "128", "-d", "1024", "-l", "1e-3", "-u", "5",
                "-o", f"{self.folder}/{out}", *self.o.options.split(), *map(str, more)]

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
        path = f"{self.folder}/{out}/metrics.jsonl"
        if not os.path.exists(path):
            return []
        with open(path) as file:
            return [json.loads(line) for line in file if line.endswith("\n")]

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
        found, allowed = distances(gpu, cpu), FP32
        if self.o.dtype == "bf16":
            noise = distances(self.train("noise", "cpu", *steps, "-b", "2"), cpu)
            allowed = tuple(max(2 * n, least) for n, least in zip(noise, BF16))
        text = "; ".join(f"{what} {x:.1e} (allowed {most:.1e})" for what, x, most in
                         zip(("loss at step 1", f"over {len(cpu)} steps", "norm at step 1"), found, allowed))
        if not all(x <= most for x, most in zip(found, allowed)):   # false for NaN
            raise Wrong(text)
        return text

    def repeat(self):
        steps = ("-x", self.o.steps)
        lines = self.train("one", self.o.device, *steps)
        self.train("other", self.o.device, *steps)
        first, last = lines[0]["loss"], lines[-1]["loss"]
        if not last < 0.75 * first:
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


def relative(a, b):
    return math.nan if a is None or b is None else abs(a - b) / abs(b)   # JSON has null for non-finite numbers


def distances(run, reference):
    """Relative differences: of the losses at step 1 and at most, and of the gradient norms at step 1."""
    losses = [relative(a["loss"], b["loss"]) for a, b in zip(run, reference, strict=True)]
    worst = math.nan if any(map(math.isnan, losses)) else max(losses)
    return losses[0], worst, relative(run[0]["grad_norm"], reference[0]["grad_norm"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("check", choices=("against-cpu", "repeat", "resume", "graphs", "generate"))
    parser.add_argument("--model", choices=MODELS, default="gpt2")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--device", default="cuda", help="cpu: try this script without a GPU")
    parser.add_argument("--options", default="", metavar="WORDS", help="more trainer options")
    parser.add_argument("--folder", default="build/gpu-runs")
    o = parser.parse_args()
    check = Check(o)
    try:
        print("note:", getattr(check, o.check.replace("-", "_"))())
    except Wrong as reason:
        print("note:", reason)
        return 1
    shutil.rmtree(check.folder)   # failed runs are kept
    return 0


if __name__ == "__main__":
    sys.exit(main())
