#!/usr/bin/env python3
"""Plots what scripts/sweep_lr.sh has found: the loss over the learning rate, a curve for each width or depth.

    python3 scripts/plot_sweep.py out/sweep/sweep.csv                          writes out/sweep/sweep.png
    python3 scripts/plot_sweep.py out/standard/sweep.csv out/mup/sweep.csv -o both.png     side by side

Needs matplotlib (Debian package python3-matplotlib).
"""
import argparse
import csv
import math
import os
import sys

from plotting import load_pyplot, plain, save


def fail(message):
    sys.exit(f"plot_sweep.py: {message}")


def read_sweep(path):
    """The name of the axis, and for each of its sizes the rates and losses."""
    curves = {}
    try:
        with open(path, encoding="utf-8", newline="") as file:
            axis, *columns = next(csv.reader([file.readline()]))
            if columns != ["lr", "loss"]:
                fail(f"{path}: expected the columns of sweep_lr.sh: width or depth, lr, loss")
            for size, rate, loss in csv.reader(file):
                curves.setdefault(int(size), []).append((float(rate), float(loss)))
    except (OSError, ValueError, StopIteration) as error:
        fail(f"cannot read {path}: {error}")
    return axis, curves


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", nargs="+", help="sweep.csv of one or several sweeps")
    parser.add_argument("-o", "--output", help="PNG to write (default: beside the first sweep.csv)")
    options = parser.parse_args()
    plt = load_pyplot(fail)
    sweeps = [read_sweep(path) for path in options.sweeps]
    figure, panels = plt.subplots(1, len(sweeps), figsize=(5.5 * len(sweeps), 4.2), sharey=True, squeeze=False)
    for path, (axis, curves), panel in zip(options.sweeps, sweeps, panels[0]):
        for size, points in sorted(curves.items()):
            points = sorted(p for p in points if not math.isnan(p[1]))
            if not points:
                continue
            line, = panel.plot(*zip(*points), marker=".", label=f"{axis} {size}")
            panel.plot(*min(points, key=lambda p: p[1]), marker="o", color=line.get_color())
        name = os.path.basename(os.path.dirname(os.path.abspath(path)))
        panel.set(xscale="log", xlabel="learning rate", title=plain(name))
        panel.grid(alpha=0.3)
        panel.legend()
    panels[0][0].set_ylabel("validation loss")
    figure.tight_layout()
    output = options.output or os.path.splitext(options.sweeps[0])[0] + ".png"
    save(figure, output, fail)
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
