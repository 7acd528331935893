#!/usr/bin/env python3
"""Plots what --coord-check has found: how large activations are, and how far some steps of training have changed them,
over the width or depth of the model, log against log. What is flat needs no other learning rate.

    ./train_gpt --coord-check 128,256,512 --model d2 --parametrization mup --base-width 32 --lr 2e-3 --json >mup.json
    python3 scripts/plot_coord_check.py mup.json                              writes mup.png
    python3 scripts/plot_coord_check.py standard.json mup.json -o both.png    one row for each

Needs matplotlib (Debian package python3-matplotlib).
"""
import argparse
import json
import os
import sys

from plotting import load_pyplot, save


def fail(message):
    sys.exit(f"plot_coord_check.py: {message}")


def read_panels(path):
    """A title, the name of the axis, its values, and the lines, for sizes and changes along each axis of a check."""
    try:
        with open(path, encoding="utf-8") as file:
            check = json.load(file)
        verdict = "PASS" if check["passed"] else "FAIL"
        return [(f"{check['parametrization']}: {verdict}" if of == "size" else f"changes, {check['parametrization']}",
                 axis["axis"], axis["values"],
                 [(line["kind"], line["values"], line["slope"]) for line in axis["lines"] if line["of"] == of])
                for axis in check["axes"] for of in ("size", "change")]
    except (OSError, ValueError, KeyError, TypeError) as error:
        fail(f"cannot read {path}: {error!r}; expected what --coord-check prints with --json")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checks", nargs="+", help="output of --coord-check --json of one or several checks")
    parser.add_argument("-o", "--output", help="PNG to write (default: beside the first check)")
    options = parser.parse_args()
    plt = load_pyplot(fail)
    rows = [read_panels(path) for path in options.checks]
    columns = max(len(row) for row in rows)
    figure, panels = plt.subplots(len(rows), columns, figsize=(5.6 * columns, 3.2 * len(rows)), squeeze=False)
    for row, of_row in zip(rows, panels):
        for panel in of_row[len(row):]:
            panel.axis("off")
        for (title, axis, values, lines), panel in zip(row, of_row):
            for kind, sizes, slope in lines:
                panel.plot(values, sizes, marker=".", label=f"{kind} {slope:+.2f}")
            panel.set(xscale="log", yscale="log", xlabel=axis, title=title)
            panel.set_xticks(values, [str(v) for v in values])
            panel.minorticks_off()
            panel.grid(alpha=0.3)
            panel.legend(fontsize="x-small", title="slope", title_fontsize="x-small", loc="upper left",
                         bbox_to_anchor=(1.01, 1))
        of_row[0].set_ylabel("root mean square")
    figure.tight_layout()
    output = options.output or os.path.splitext(options.checks[0])[0] + ".png"
    save(figure, output, fail)
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
