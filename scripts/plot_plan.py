#!/usr/bin/env python3
"""Draws plans from what ./train_gpt --plan --json prints: memory by name, where the time of a step goes, what each
stage does when, and the speed of several plans.

    ./train_gpt --plan --json --machine h100x8 --model llama3:8B --ranks 32 --pp 4 --dtype bf16 >plan.json
    python3 scripts/plot_plan.py plan.json                               writes plan.png
    python3 scripts/plot_plan.py 8.json 16.json 32.json -o ranks.png     compares them
    python3 scripts/plot_plan.py plan.json --html plan.html              one page: the picture and tables

scripts/explorer.py shows the same for sliders to play with. Needs matplotlib (Debian package python3-matplotlib).
"""
import argparse
import base64
import html
import io
import json
import os
import sys

from plotting import load_pyplot, plain

COLOURS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "explorer", "colours.json")
PASSES = {"forward": "forward", "backward": "backward", "backward_input": "backward, input part",
          "backward_weight": "backward, weight part", "update": "update", "idle": "bubble"}
DARK = ("#3b78b5", "#8e6bb0", "#b5404a")   # of colours.json: text on them is white
NO_TIMES = "no times: plan with --machine, and without servers"
FIELDS = ("step_seconds", "tokens_per_second", "mfu", "memory_bytes", "memory_limit_bytes", "device", "model", "batch",
          "layout", "time", "stages")
GIB = 2**30


def fail(message):
    sys.exit(f"plot_plan.py: {message}")


def read_plan(path):
    expected = "expected what ./train_gpt --plan --json prints"
    try:
        with open(path, encoding="utf-8") as file:
            plan = json.load(file)
    except OSError as error:
        fail(f"cannot read {path}: {error.strerror}; {expected}")
    except (ValueError, RecursionError):
        fail(f"{path}: not JSON; {expected}")
    missing = [f for f in FIELDS if f not in plan] if isinstance(plan, dict) else FIELDS
    if missing:
        fail(f"{path}: no \"{missing[0]}\"; {expected}")
    plan["file"] = os.path.splitext(os.path.basename(path))[0]
    return plan


# ---- What is drawn and listed ----------------------------------------------------------------------------------------


def axes_of(plan):
    """"8 stages of 64 ranks, zb-v, tp 8": the layout, in words."""
    layout = plan["layout"]
    words = [f"{layout['ranks']:,} rank{'s' if layout['ranks'] > 1 else ''}"]
    words += [f"{axis} {layout[axis]}" for axis in ("tp", "cp", "pp", "ep") if layout[axis] > 1]
    if layout["pp"] > 1:
        words.append(layout["schedule"])
    if layout["zero_stage"]:
        words.append(f"ZeRO {layout['zero_stage']}")
    return ", ".join(words)


def title_of(plan):
    return f"{plan['file']}: {plan['model']['name']}, {axes_of(plan)}"


def seconds_text(seconds):
    scale, unit = next(((s, u) for s, u in ((1, "s"), (1e3, "ms")) if seconds * s >= 1), (1e6, "µs"))
    return f"{seconds * scale:.3g} {unit}"


def memory_rows(plan):
    """(name, rank) of each run of stages that hold the same, and of the ranks that a parameter server serves."""
    runs = []
    for stage in plan["stages"]:
        if runs and runs[-1][2]["memory"] == stage["memory"]:
            runs[-1][1] = stage["stage"]
        else:
            runs.append([stage["stage"], stage["stage"], stage])
    rows = [(f"stage {first}" if first == last else f"stages {first}–{last}", rank) for first, last, rank in runs]
    if len(plan["stages"]) == 1:
        rows = [("each rank", plan["stages"][0])]
    if plan.get("other_ranks"):
        rows.append(("other ranks", plan["other_ranks"]))
    return rows


def time_parts(plan, colours):
    """(name, seconds, colour): they add up to the step. Empty if the plan has no times."""
    time = plan["time"]
    if time is None:
        return []
    stage = plan["stages"][time["slowest_stage"]]
    products = sum(op["seconds"] for op in stage["ops"] if op["flops"] > 0)
    rest = max(0, time["compute_seconds"] - products - time["update_seconds"])
    parts = [("products and attention", products, colours["products and attention"]),
             ("other computation", rest, colours["other computation"]),
             ("norm and update", time["update_seconds"], colours["norm and update"])]
    exposed = colours["exposed"]
    parts += [(f"exposed: {each['group']}", each["seconds"], exposed[k % len(exposed)])
              for k, each in enumerate(stage["exposed"])]
    parts.append(("bubble", time["bubble_seconds"], colours["bubble"]))
    return [part for part in parts if part[1] > 0]


# ---- The picture -----------------------------------------------------------------------------------------------------


def darker(colour, share):
    return "#" + "".join(f"{int(int(colour[i:i + 2], 16) * (1 - 0.35 * share)):02x}" for i in (1, 3, 5))


def draw_memory(axis, plan, colours):
    """Returns the names that are drawn."""
    rows, shown = memory_rows(plan), set()
    for y, (_, rank) in enumerate(rows):
        at, rest = 0, 0
        for part in rank["memory"]:
            if part["name"] not in colours:
                rest += part["bytes"]
                continue
            shown.add(part["name"])
            axis.barh(y, part["bytes"] / GIB, left=at, color=colours[part["name"]], height=0.7)
            at += part["bytes"] / GIB
        if rest:
            shown.add("other")
            axis.barh(y, rest / GIB, left=at, color=colours["other"], height=0.7)
        axis.text(1.01, y, f"{rank['memory_bytes'] / GIB:.1f}", transform=axis.get_yaxis_transform(), va="center",
                  fontsize=8)
    limit = plan["memory_limit_bytes"]
    most = max([plan["memory_bytes"], *([limit] if limit else [])])
    if limit:
        axis.axvline(limit / GIB, color="#b3261e", linestyle="--", linewidth=1.5)
        axis.text(limit / GIB, 1.01, f"limit {limit / GIB:.1f}", transform=axis.get_xaxis_transform(), color="#b3261e",
                  ha="right", va="bottom", fontsize=8)
    axis.set_yticks(range(len(rows)), [name for name, _ in rows])
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_xlim(0, most / GIB * 1.02)
    axis.set_xlabel("memory of a rank (GiB)")
    return shown


def draw_timeline(axis, plan, colours, end):
    """Stages down, time across; a micro-batch's number where there is room for it. Returns the kinds that are drawn."""
    stages = plan["stages"]
    axis.set_yticks(range(len(stages)), [f"stage {s}" for s in range(len(stages))])
    axis.set_ylim(len(stages) - 0.5, -0.5)
    axis.set_xlim(0, end or 1)
    axis.set_xlabel("seconds from the beginning of the step")
    if any(stage["timeline"] is None for stage in stages):
        axis.text(0.5, 0.5, NO_TIMES if plan["time"] is None else "too many passes to draw", transform=axis.transAxes,
                  ha="center", va="center")
        return set()
    chunks, kinds = plan["layout"]["chunks_per_stage"], {"idle"} if len(stages) > 1 else set()
    for y, stage in enumerate(stages):
        axis.barh(y, plan["step_seconds"], color=colours["idle"], height=0.8)
        passes = stage["timeline"]
        shades = [darker(colours[p["kind"]], p.get("chunk", 0) // len(stages) / max(1, chunks - 1)) for p in passes]
        axis.broken_barh([(p["begin"], p["end"] - p["begin"]) for p in passes], (y - 0.4, 0.8), facecolors=shades,
                         edgecolor="white" if len(passes) < 200 else "none", linewidth=0.4, snap=False)
        for p in passes:
            kinds.add(p["kind"])
            if p["kind"] != "update" and p["end"] - p["begin"] > 0.018 * end:
                axis.text((p["begin"] + p["end"]) / 2, y, p["micro_batch"], ha="center", va="center", fontsize=7)
    return kinds


def legend(axis, entries, patch, columns):
    """In the place of a chart.   entries: names and colours"""
    axis.set_axis_off()
    axis.legend([patch(color=colour) for _, colour in entries], [name for name, _ in entries], fontsize=8,
                ncol=columns, loc="lower left", bbox_to_anchor=(0, 0), borderaxespad=0, frameon=False)


def draw_split(axis, plans, colours, patch):
    shown = {}
    for y, plan in enumerate(plans):
        at = 0
        for name, seconds, colour in time_parts(plan, colours):
            if name.startswith("exposed: "):   # other plans may expose other groups
                colour = colours["exposed"][sum(n.startswith("exposed: ") for n in shown) % len(colours["exposed"])]
            shown.setdefault(name, colour)
            share = 100 * seconds / plan["step_seconds"]
            axis.barh(y, share, left=at, color=shown[name], height=0.7)
            if share > 4:
                axis.text(at + share / 2, y, f"{share:.1f}%", ha="center", va="center", fontsize=8,
                          color="white" if shown[name] in DARK else "black")
            at += share
        if plan["time"] is None:
            axis.text(1, y, NO_TIMES, va="center", fontsize=8)
    axis.set_yticks(range(len(plans)), [plain(plan["file"]) for plan in plans])
    axis.set_ylim(len(plans) - 0.5, -0.5)
    axis.set_xlim(0, 100)
    axis.set_xlabel("% of a step, on the slowest stage")
    axis.legend([patch(color=c) for c in shown.values()], list(shown), fontsize=7, ncol=4, loc="lower left",
                bbox_to_anchor=(0, 1), frameon=False)


def draw_speed(axis, plans, ticker):
    """Tokens per second over ranks, beside what the plan of fewest ranks would reach on more."""
    timed = sorted((p for p in plans if p["step_seconds"]), key=lambda p: p["layout"]["ranks"])
    if not timed:
        axis.set_axis_off()
        return
    ranks, speeds = [p["layout"]["ranks"] for p in timed], [p["tokens_per_second"] for p in timed]
    if len(set(ranks)) == 1:   # by name
        axis.barh(range(len(timed)), speeds, color="#3b78b5", height=0.6)
        axis.set_yticks(range(len(timed)), [plain(p["file"]) for p in timed])
        axis.set_ylim(len(timed) - 0.5, -0.5)
        axis.set_xlabel(f"tokens per second on {ranks[0]:,} ranks")
        return
    axis.plot(ranks, speeds, marker="o", color="#3b78b5", label="planned")
    axis.plot(ranks, [speeds[0] * r / ranks[0] for r in ranks], linestyle="--", color="#888888", label="proportional")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=10)
    axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
    axis.set_xticks(sorted(set(ranks)), [f"{r:,}" for r in sorted(set(ranks))])
    axis.minorticks_off()
    axis.set_xlabel("ranks")
    axis.set_ylabel("tokens per second")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)


def draw(plans, colours, plt, patch):
    """A row for each plan, memory beside the schedule; below, the time of all, and their speed."""
    height = [0.9] + [1.2 + 0.28 * max(len(memory_rows(p)), len(p["stages"])) for p in plans]
    height.append(1.5 if len(plans) == 1 else max(3.2, 1.3 + 0.3 * len(plans)))
    figure = plt.figure(figsize=(15, sum(height) + 0.3), constrained_layout=True)
    rows = figure.add_gridspec(len(height), 1, height_ratios=height)
    same_model = len({(p["model"]["name"], p["batch"]["tokens_per_step"]) for p in plans}) == 1
    end = max((p["step_seconds"] or 0) for p in plans) if same_model else None
    held, kinds = set(), set()
    for plan, row in zip(plans, list(rows)[1:]):
        memory, timeline = row.subgridspec(1, 2, width_ratios=(1, 1.5)).subplots()
        speed = plan["step_seconds"] and (f"{seconds_text(plan['step_seconds'])}, {plan['tokens_per_second']:,.0f} "
                                          f"tokens/s, MFU {100 * plan['mfu']:.1f}%")
        memory.set_title(plain(title_of(plan)), fontsize=10, loc="left", pad=16)
        timeline.set_title(speed or "", fontsize=10, loc="left")
        held |= draw_memory(memory, plan, colours["memory"])
        kinds |= draw_timeline(timeline, plan, colours["passes"], end or plan["step_seconds"] or 0)
    left, right = rows[0].subgridspec(1, 2, width_ratios=(1, 1.5)).subplots()
    legend(left, [(name, colour) for name, colour in colours["memory"].items() if name in held], patch, 4)
    legend(right, [(name, colours["passes"][kind]) for kind, name in PASSES.items() if kind in kinds], patch, 5)
    if len(plans) == 1:
        draw_split(figure.add_subplot(rows[-1]), plans, colours["time"], patch)
    else:
        split, speed = rows[-1].subgridspec(1, 2, width_ratios=(1.5, 1)).subplots()
        draw_split(split, plans, colours["time"], patch)
        draw_speed(speed, plans, plt.matplotlib.ticker)
    return figure


# ---- The page --------------------------------------------------------------------------------------------------------


def table(heads, rows):
    def row(kind, cells):
        return "<tr>" + "".join(f"<{kind}>{html.escape(str(cell))}</{kind}>" for cell in cells) + "</tr>"
    return "<table>" + row("th", heads) + "".join(row("td", cells) for cells in rows) + "</table>"


def tables_of(plan, colours):
    rows = memory_rows(plan)
    names = list(dict.fromkeys(part["name"] for _, rank in rows for part in rank["memory"]))
    held = [{part["name"]: part["bytes"] for part in rank["memory"]} for _, rank in rows]
    cells = [[name, *(f"{of.get(name, 0) / GIB:.3f}" for of in held)] for name in names]
    cells.append(["total", *(f"{rank['memory_bytes'] / GIB:.3f}" for _, rank in rows)])
    parts = [f"<h2>{html.escape(title_of(plan))}</h2>", f"<p>{html.escape(plan['device'])}</p>"]
    if plan["time"]:
        step = plan["step_seconds"]
        parts.append(table(("time of a step", "tokens/s", "MFU (%)"),
                           [(seconds_text(step), f"{plan['tokens_per_second']:,.0f}", f"{100 * plan['mfu']:.1f}")]))
        split = [(name, seconds_text(s), f"{100 * s / step:.1f}") for name, s, _ in time_parts(plan, colours["time"])]
        parts.append(table(("where the time goes", "", "% of a step"), split))
        losses = [(each["what"], seconds_text(each["seconds"]), f"{100 * each['seconds'] / step:.1f}", each["remedy"])
                  for each in plan["time"]["losses"] if each["seconds"] > 0.01 * step]
        if losses:
            parts.append(table(("lost to", "", "% of a step", "what reduces it"), losses))
    parts.append(table(("memory of a rank (GiB)", *(name for name, _ in rows)), cells))
    sent = [(name, each["group"], f"{each['bytes'] / GIB:.3f}") for name, rank in rows for each in rank["sent"]]
    if sent:
        parts.append(table(("sent by a rank", "group", "GiB per step"), sent))
    return "\n".join(parts)


PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ margin: 24px auto; max-width: 1500px; padding: 0 16px; font: 15px/1.4 system-ui, sans-serif; color: #1c2733; }}
img {{ width: 100%; }}
table {{ border-collapse: collapse; margin: 12px 0; font-size: 14px; }}
th, td {{ padding: 2px 16px 2px 0; border-bottom: 1px solid #d5dce4; text-align: left; }}
</style>
</head>
<body>
<h1>{title}</h1>
<img src="data:image/png;base64,{png}" alt="Memory, time of a step, schedule: the tables below have the numbers">
{tables}
</body>
</html>
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", nargs="+", metavar="PLAN.json", help="what ./train_gpt --plan --json printed")
    parser.add_argument("-o", "--output", help="PNG to write (default for a single plan without --html: its name with "
                                               ".png)")
    parser.add_argument("--html", help="page to write, one file with the picture and tables")
    options = parser.parse_args()
    if not options.output and not options.html:
        if len(options.plans) > 1:
            fail("several plans: name the output with -o FILE.png or --html FILE.html")
        options.output = os.path.splitext(options.plans[0])[0] + ".png"
    plt = load_pyplot(fail)
    plans = [read_plan(path) for path in options.plans]
    from matplotlib.patches import Patch

    with open(COLOURS, encoding="utf-8") as file:
        colours = json.load(file)
    png = io.BytesIO()
    draw(plans, colours, plt, Patch).savefig(png, format="png", dpi=110)
    title = "Plan of " + ", ".join(dict.fromkeys(plan["model"]["name"] for plan in plans))
    page = PAGE.format(title=html.escape(title), png=base64.b64encode(png.getvalue()).decode(),
                       tables="\n".join(tables_of(plan, colours) for plan in plans))
    for path, data in ((options.output, png.getvalue()), (options.html, page.encode())):
        if not path:
            continue
        try:
            with open(path, "wb") as file:
                file.write(data)
        except OSError as error:
            fail(f"cannot write {path}: {error.strerror}")
        print(f"plot: {path}")


if __name__ == "__main__":
    main()
