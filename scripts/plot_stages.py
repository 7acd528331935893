#!/usr/bin/env python3
"""Draws the stages of a run over its tokens: learning rate, tokens of a step, sequence length, and the mix of sources.

    ./train_gpt --stages recipe.toml --data ... --print-stages --json >stages.json
    scripts/plot_stages.py stages.json [-o stages.png]

Needs matplotlib.
"""
import argparse
import json
import sys

from plotting import load_pyplot, plain, save


def fail(message):
    sys.exit(f"plot_stages.py: {message}")


def read(path):
    try:
        with (sys.stdin if path == "-" else open(path, encoding="utf-8")) as file:
            stages = json.load(file)
        if not stages["stretches"] or not stages["tokens"] > 0:
            raise KeyError("stretches")
        return stages
    except OSError as error:
        fail(f"{path}: {error.strerror}")
    except (ValueError, KeyError, TypeError):
        fail(f"{path}: expected what ./train_gpt --print-stages --json prints")


def draw(plt, stages, out):
    stretches = [s for s in stages["stretches"] if s["tokens_after"] > s["tokens"]]
    edges = [s["tokens"] for s in stretches] + [stretches[-1]["tokens_after"]]
    sources = list(stretches[0].get("mix", {}))
    figure, axes = plt.subplots(3 + bool(sources), 1, sharex=True, figsize=(9, 7), layout="constrained")
    for s in stretches:
        axes[0].plot(*zip(*s["learning_rate"]), color="C0")
    axes[0].set_ylabel("learning rate")
    axes[0].set_ylim(bottom=0)
    for axis, field, name in (axes[1], "tokens_per_step", "tokens per step"), (axes[2], "seq_len", "sequence length"):
        axis.stairs([s[field] for s in stretches], edges, baseline=None)
        axis.set_ylabel(name)
        axis.set_ylim(bottom=0)
    if sources:
        below = [0.0] * len(stretches)
        for source in sources:
            above = [b + s["mix"][source] for b, s in zip(below, stretches)]
            axes[3].stairs(above, edges, baseline=below, fill=True, label=plain(source))
            below = above
        axes[3].set_ylabel("share of samples")
        axes[3].set_ylim(0, 1)
        axes[3].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    axes[-1].set_xlabel("tokens")
    named = None
    for s in stretches:
        if s["stage"] == named:
            continue
        named = s["stage"]
        for axis in axes:
            axis.axvline(s["tokens"], color="0.8", linewidth=0.8)
        axes[0].annotate(plain(s["name"]), (s["tokens"], 1), xycoords=("data", "axes fraction"), xytext=(3, 3),
                         textcoords="offset points", fontsize=8)
    save(figure, out, fail)
    print(f"wrote {out}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("stages", help="a file, or - for stdin")
    parser.add_argument("-o", "--out", default="stages.png")
    asked = parser.parse_args()
    plt = load_pyplot(fail)
    draw(plt, read(asked.stages), asked.out)


if __name__ == "__main__":
    main()
