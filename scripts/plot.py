#!/usr/bin/env python3
"""Plots metrics.jsonl of one or several runs: loss, learning rate, gradient norm and throughput over the steps.

    python3 scripts/plot.py out/kjv                 writes out/kjv/plot.png
    python3 scripts/plot.py out/a out/b -o ab.png   compares runs

Lines of other kinds, and an incomplete last line, are skipped. Needs matplotlib
(Debian package python3-matplotlib).
"""
import argparse
import json
import math
import os
import sys

from plotting import load_pyplot, plain, save


def fail(message):
    sys.exit(f"plot.py: {message}")


def read_metrics(run):
    """The metrics of a run by kind. `run`: a directory with metrics.jsonl, or the file itself."""
    path = os.path.join(run, "metrics.jsonl") if os.path.isdir(run) else run
    try:
        with open(path, encoding="utf-8", errors="replace") as file:   # the last line may end within a character
            lines = file.read().rstrip("\n").split("\n")
    except OSError as error:
        fail(f"cannot read {path}: {error.strerror}; expected a run's directory or its metrics.jsonl")
    kinds = {"train": [], "val": []}
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            if number == len(lines):
                continue  # still being written
            fail(f"{path}, line {number}: not a JSON object: {line[:60]!r}")
        if isinstance(entry, dict) and entry.get("kind") in kinds and "step" in entry:
            kinds[entry["kind"]].append(entry)
    if not kinds["train"] and not kinds["val"]:
        fail(f"{path}: no training or validation line; has the run completed its first step?")
    return kinds


def series(entries, field):
    """Steps and values; a non-finite number (null in the file) leaves a gap."""
    pairs = [(e["step"], e.get(field)) for e in entries]
    return [s for s, _ in pairs], [math.nan if v is None else v for _, v in pairs]


def smoothed(values, window):
    """A running mean over the last `window` numeric values."""
    sums, counts = [0.0], [0]   # of the values before each
    for value in values:
        sums.append(sums[-1] + (0 if math.isnan(value) else value))
        counts.append(counts[-1] + (not math.isnan(value)))
    means = []
    for end in range(1, len(values) + 1):
        begin = max(0, end - window)
        count = counts[end] - counts[begin]
        means.append((sums[end] - sums[begin]) / count if count else math.nan)
    return means


def directory_of(run):
    return os.path.abspath(run if os.path.isdir(run) else os.path.dirname(run))


def default_output(runs):
    """In the directory of a single run; for several beside that of the first, by the names of at most three."""
    first = directory_of(runs[0])
    if len(runs) == 1:
        return os.path.relpath(os.path.join(first, "plot.png"))
    names = [os.path.basename(directory_of(run)) for run in runs[:3]] + [f"{len(runs) - 3}-more"] * (len(runs) > 3)
    return os.path.relpath(os.path.join(os.path.dirname(first), f"plot-{'-'.join(names)}.png"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="run directories or metrics.jsonl files")
    parser.add_argument("-o", "--output", help="PNG to write (default: plot.png in a run's directory; for several runs "
                                               "plot-A-B.png beside the first one's directory, by their names)")
    options = parser.parse_args()
    plt = load_pyplot(fail)

    output = options.output or default_output(options.runs)

    figure, axes = plt.subplots(2, 2, figsize=(12, 7.5), constrained_layout=True)
    (loss, rate), (norm, speed) = axes
    for index, run in enumerate(options.runs):
        color, metrics = f"C{index}", read_metrics(run)
        name = plain(os.path.basename(directory_of(run)))
        window = max(1, len(metrics["train"]) // 100)
        dots = "." if len(metrics["train"]) < 20 else None   # a line through one number is not seen
        steps, losses = series(metrics["train"], "loss")
        loss.plot(steps, losses, color=color, alpha=0.25, linewidth=0.8)
        loss.plot(steps, smoothed(losses, window), color=color, linewidth=1.6, marker=dots, label=f"{name}: training")
        if metrics["val"]:
            loss.plot(*series(metrics["val"], "loss"), color=color, linestyle="--", marker="o", markersize=4,
                      label=f"{name}: validation")
        averaged = [{"step": e["step"], **e["ema"]} for e in metrics["val"] if "ema" in e]
        if averaged:
            loss.plot(*series(averaged, "loss"), color=color, linestyle="-.", marker="x", markersize=4,
                      label=f"{name}: validation of averaged weights")
        for number, one in enumerate(sorted({one for e in metrics["val"] for one in e.get("losses", {})})):
            loss.plot(*series([{"step": e["step"], "loss": e.get("losses", {}).get(one)} for e in metrics["val"]], "loss"),
                      color=color, linestyle=":", marker="sv^Dx+"[number % 6], markersize=4, linewidth=0.8,
                      label=f"{name}: validation of {plain(one)}")
        rate.plot(*series(metrics["train"], "lr"), color=color, marker=dots, label=name)
        for axis, field in ((norm, "grad_norm"), (speed, "tokens_per_s")):
            steps, values = series(metrics["train"], field)
            axis.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
            axis.plot(steps, smoothed(values, window), color=color, linewidth=1.6, marker=dots, label=name)
    for axis, title in ((loss, "loss (nats per token)"), (rate, "learning rate"), (norm, "gradient norm, before clipping"),
                        (speed, "tokens per second")):
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    norm.set_yscale("log")
    speed.set_ylim(bottom=0)
    loss.legend(loc="upper right")   # "best" takes long for long runs
    if len(options.runs) > 1:
        rate.legend()
    save(figure, output, fail)
    print(f"plot: {output}")


if __name__ == "__main__":
    main()
