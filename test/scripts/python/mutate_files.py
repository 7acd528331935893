#!/usr/bin/env python3
"""Damages the files that a run reads, one at a time, and starts ./train_gpt: run.json, trainer.json and metrics.jsonl of a
run that resumes, --config files, and questions of --eval-choices.

  test/scripts/python/mutate_files.py [--count N] [--seed N] [--jobs N]

Each start is refused with a message that names the file, or its losses, weights and optimizer state are bitwise those of
the undamaged file. What a --config file or questions say otherwise, as text, may lead to something else. Exits with
status 1 after the first mutation that is silently different, or that ends the program in another way.
"""
import argparse
import collections
import concurrent.futures
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile

DATA = "test/golden/gpt2_tiny/train.bin"
TINY = ["--model", "d1", "--n-embd", "12", "--n-head", "2", "--vocab-size", "211", "--train-data", DATA, "--seq-len",
        "33", "--batch-size", "2", "--total-batch-size", "66", "--threads", "1", "--val-data", DATA, "--val-steps", "2",
        "--val-every", "1", "--max-steps", "3", "--checkpoint-every", "1", "--keep-best"]
QUESTIONS = ('{"context": [1, 2, 3], "choices": [[4], [5, 6], [7, 8, 9]], "label": 1}\n'
             '{"context": [9], "choices": [[1, 2], [3]], "label": 0}\n'
             '{"context": [9, 4, 6, 1, 7], "choices": [[1, 2], [3, 5, 8]], "label": 1}\n')


def run(*arguments):
    done = subprocess.run(["./train_gpt", *arguments], capture_output=True, timeout=300, check=False)
    return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")


def read(path):
    with open(path, "rb") as file:
        return file.read()


def write(path, data):
    with open(path, "wb") as file:
        file.write(data)


def mutate(rng, data):
    """One change, or two."""
    for _ in range(rng.choice((1, 1, 2))):
        at = rng.randrange(len(data) + 1)
        length = min(len(data) - at, 1 << rng.randrange(9))
        piece = data[at:at + length]
        kind = rng.randrange(8)
        if kind <= 2 and at < len(data):
            data = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1:]
        elif kind == 3:
            data = data[:at] + data[at + length:]
        elif kind == 4:
            data = data[:at] + piece + data[at:]
        elif kind == 5:
            data = data[:at]
        elif kind == 6:
            data = data[:at] + rng.choice((b"\0", b"\xff", b"\"", b"{", b"}", b",", b"9", b"-", b"e9", b"null", b"\n",
                                           b"true", b"false", b"\x1b[2J")) + data[at:]
        else:
            lines = data.split(b"\n")
            one, other = rng.randrange(len(lines)), rng.randrange(len(lines))
            lines[one], lines[other] = lines[other], lines[one]
            data = b"\n".join(lines)
    return data


def results(out):
    """What must not depend on damage: weights, optimizer state, the loss of every step that was trained after it, and
    what is the best checkpoint."""
    found = []
    for name in sorted(os.listdir(out + "/step-000003")):
        if name.endswith(".safetensors"):
            found.append((name, hashlib.sha256(read(f"{out}/step-000003/{name}")).hexdigest()))
    for line in read(out + "/metrics.jsonl").splitlines():
        try:
            item = json.loads(line)
            if item["step"] == 3 and item["kind"] in ("train", "val"):
                found.append((item["kind"], item["loss"], item.get("grad_norm")))
        except (ValueError, TypeError, KeyError):
            found.append(("damaged line",))
    found.append(json.loads(read(out + "/step-000003/trainer.json"))["best_validation"])
    return found


def refusal(code, error, names):
    """Whether it was refused, with a message that names one of these files."""
    return code == 1 and error.startswith("train_gpt: ") and "internal" not in error and any(n in error for n in names)


class Resume:
    """A run of two steps of three, in which one file is damaged."""

    def __init__(self, work, name, file, keep_checkpoints):
        self.name, self.file, self.work = name, file, work
        whole, self.base = work + "/whole", f"{work}/base-{name.replace(' ', '-')}"
        if not os.path.exists(whole):
            # --shuffle is not given when it resumes: it goes on as before
            code, _, error = run(*TINY, "--no-shuffle", "--out-dir", whole)
            assert code == 0, error
        shutil.copytree(whole, self.base, symlinks=True)
        for step in (3,) if keep_checkpoints else (1, 2, 3):
            shutil.rmtree(f"{self.base}/step-{step:06}")
        self.expected = results(whole)

    def look(self, rng, place):
        shutil.copytree(self.base, place, symlinks=True)
        path = f"{place}/{self.file}"
        changed = mutate(rng, read(path))
        write(path, changed)
        code, out, error = run(*TINY, "--out-dir", place)
        if refusal(code, error, (self.file.split("/")[-1],)):
            return "refused"
        if code != 0:
            return f"status {code}: {error[:600]}"
        if results(place) == self.expected:
            return "the same, with a warning" if "WARNING" in out else "the same"
        return f"silently different: {results(place)} instead of {self.expected}"


def settings(text):
    """What a --config file says, by its lines; the last of equal names."""
    found = {}
    for line in text.split("\n"):
        line = line.strip(" \t\r\v\f")
        if line and not line.startswith("#") and "=" in line:
            name, value = line.split("=", 1)
            found[name.strip()] = value.strip().strip('"')
    return found


class Config:
    name = "--config"

    def __init__(self, work):
        code, out, error = run(*TINY, "--print-config")
        assert code == 0, error
        self.text = out

    def look(self, rng, place):
        changed = mutate(rng, self.text.encode())
        write(place, changed)
        code, out, error = run("--config", place, "--print-config")
        if refusal(code, error, (place, "--")):
            return "refused"
        if code != 0:
            return f"status {code}: {error[:600]}"
        if out == self.text:
            return "the same"
        before, after = settings(self.text), settings(changed.decode(errors="replace"))
        shown_before, shown_after = settings(self.text), settings(out)
        for name in shown_before.keys() | shown_after.keys():
            if shown_before.get(name) != shown_after.get(name) and before.get(name) == after.get(name):
                return f"silently different: {name} is {shown_after.get(name)}, which the file does not say"
        return "says something else"


class Questions:
    name = "--eval-choices"

    def __init__(self, work):
        self.model = work + "/whole/step-000003"
        write(work + "/questions.jsonl", QUESTIONS.encode())
        self.expected = self.ask(work + "/questions.jsonl")
        assert self.expected[0] == 0, self.expected

    def ask(self, file):
        code, out, error = run("--evaluate", "--model", self.model, "--val-data", DATA, "--val-steps", "1",
                               "--batch-size", "2", "--threads", "1", "--eval-choices", file)
        lines = [line for line in out.split("\n") if line.strip().startswith(("loss", "choices"))
                 or "questions" in line]
        return code, [line.replace(file, "FILE") for line in lines], error

    @staticmethod
    def parsed(text):
        return [json.loads(line) for line in text.split("\n") if line.strip()]

    def look(self, rng, place):
        changed = mutate(rng, QUESTIONS.encode())
        write(place, changed)
        code, lines, error = self.ask(place)
        if refusal(code, error, (place,)):
            return "refused"
        if code != 0:
            return f"status {code}: {error[:600]}"
        if lines == self.expected[1]:
            return "the same"
        try:
            same = self.parsed(changed.decode()) == self.parsed(QUESTIONS)
        except ValueError as fault:
            return f"silently different: it was read, but {fault}"
        return f"silently different: {lines}" if same else "says something else"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        kinds = [Resume(work, "run.json", "run.json", True), Resume(work, "run.json alone", "run.json", False),
                 Resume(work, "trainer.json", "step-000002/trainer.json", True),
                 Resume(work, "metrics.jsonl", "metrics.jsonl", True),
                 Resume(work, "metrics.jsonl alone", "metrics.jsonl", False), Config(work), Questions(work)]
        counts = collections.Counter()

        def one(number):
            kind = kinds[number % len(kinds)]
            place = f"{work}/m{number}"
            found = kind.look(random.Random(f"{arguments.seed} {number}"), place)
            shutil.rmtree(place, ignore_errors=True)
            if os.path.exists(place):
                os.unlink(place)
            return kind.name, number, found

        with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
            for name, number, found in pool.map(one, range(arguments.count)):
                counts[name, found[:40]] += 1
                if found not in ("refused", "the same", "the same, with a warning", "says something else"):
                    print(f"{name}, --seed {arguments.seed}, mutation {number}: {found}", flush=True)
                    counts["bad"] += 1
                    if counts["bad"] == 20:
                        break
    bad = counts.pop("bad", 0)
    for (name, found), count in sorted(counts.items()):
        print(f"{name:22} {found:42} {count:6}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
