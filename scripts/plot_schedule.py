#!/usr/bin/env python3
"""Draws schedules of a pipeline, stages down and time across, from what ./train_gpt --print-schedule --json prints, or
from the files that --trace writes, of runs and of plans.

    ./train_gpt --print-schedule --pp 4 --schedule zb-h1 --json >zb-h1.json
    python3 scripts/plot_schedule.py zb-h1.json                      writes zb-h1.png
    python3 scripts/plot_schedule.py 1f1b.json zb-h1.json -o ab.png  compares them on one time axis
    python3 scripts/plot_schedule.py plan.json run.json -o ab.png    the same for two files of --trace

The second and further chunks of a stage are darker. The unit of time is a stage's forward of a whole micro-batch, so
that schedules of the same model can be compared; for traces it is the millisecond, and of the ranks of a stage the
first is drawn. Needs matplotlib (Debian package python3-matplotlib).
"""
import argparse
import json
import os
import sys

from plotting import load_pyplot, save

COLOURS = {"forward": "#9ecae1", "backward": "#a1d99b", "backward_input": "#a1d99b", "backward_weight": "#fdd0a2"}
NAMES = {"forward": "forward", "backward": "backward", "backward_input": "input part of the backward",
         "backward_weight": "weight part of the backward"}
KINDS_OF_TRACES = {"forward": "forward", "backward": "backward", "input part of the backward": "backward_input",
                   "weight part of the backward": "backward_weight"}
FIELDS = ("schedule", "stages", "chunks_per_stage", "micro_batches", "slices", "makespan", "bubble", "idle", "actions")


def fail(message):
    sys.exit(f"plot_schedule.py: {message}")


def read_schedule(path):
    try:
        with open(path, encoding="utf-8") as file:
            schedule = json.load(file)
    except OSError as error:
        fail(f"cannot read {path}: {error.strerror}; expected what ./train_gpt --print-schedule --json prints")
    except ValueError:
        fail(f"{path}: not JSON; expected what ./train_gpt --print-schedule --json prints")
    if isinstance(schedule, dict) and "traceEvents" in schedule:
        return schedule_of_trace(path, schedule)
    missing = [f for f in FIELDS if f not in schedule] if isinstance(schedule, dict) else FIELDS
    if missing:
        fail(f"{path}: no \"{missing[0]}\"; expected what ./train_gpt --print-schedule --json prints")
    return schedule


def schedule_of_trace(path, trace):
    """What --print-schedule --json prints, with the times of a trace in milliseconds."""
    try:
        schedule = dict(trace["otherData"])
        ranks_of_stage = 1 if schedule["kind"] == "plan" else schedule["ranks"] // schedule["stages"]
        actions = [[] for _ in range(schedule["stages"])]
        for event in trace["traceEvents"]:
            if event.get("cat") != "action" or event["ph"] != "X" or event["pid"] % ranks_of_stage != 0:
                continue
            kind = KINDS_OF_TRACES.get(event["args"]["kind"])
            if kind is not None:
                begin = event["ts"] / 1000
                actions[event["pid"] // ranks_of_stage].append(
                    {**event["args"], "kind": kind, "begin": begin, "end": begin + event["dur"] / 1000})
        first = min(a["begin"] for stage in actions for a in stage)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        fail(f"{path}: not a trace of ./train_gpt --trace: {error!r}")
    for stage in actions:
        for action in stage:
            action["begin"] -= first
            action["end"] -= first
    makespan = max(a["end"] for stage in actions for a in stage)
    idle = [1 - sum(a["end"] - a["begin"] for a in stage) / makespan for stage in actions]
    schedule.update(actions=actions, makespan=makespan, idle=idle, bubble=sum(idle) / len(idle), unit="milliseconds")
    return schedule


def passes_of_a_micro_batch(schedule):
    return 1 if "unit" in schedule else schedule["chunks_per_stage"] * schedule["slices"]


def boxes(schedule):
    """(stage, kind, chunk of the stage, label, begin, end) of everything that is drawn."""
    scale = 1 / passes_of_a_micro_batch(schedule)
    for stage, actions in enumerate(schedule["actions"]):
        for a in actions:
            if a["kind"] in COLOURS:
                label = f"{a['micro_batch']}" + (f".{a['slice']}" if schedule["slices"] > 1 else "")
                yield stage, a["kind"], a["chunk"] // schedule["stages"], label, a["begin"] * scale, a["end"] * scale


def title(schedule):
    text = f"{schedule['schedule']}: {schedule['stages']} stages, {schedule['micro_batches']} micro-batches"
    if schedule["slices"] > 1:
        text += f" in {schedule['slices']} slices"
    if schedule["chunks_per_stage"] > 1:
        text += f", {schedule['chunks_per_stage']} chunks per stage"
    return text + f"; bubble {100 * schedule['bubble']:.1f}%"


def darker(colour, chunk):
    parts = (int(colour[i:i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{int(p * 0.8 ** chunk):02x}" for p in parts)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schedules", nargs="+", help="JSON files")
    parser.add_argument("-o", "--output", help="PNG to write (default for a single schedule: its name with .png)")
    options = parser.parse_args()
    if options.output is None and len(options.schedules) > 1:
        fail("several schedules: name the output with -o FILE.png")
    plt = load_pyplot(fail)
    schedules = [read_schedule(path) for path in options.schedules]
    units = {s.get("unit", "forwards of a micro-batch by a stage") for s in schedules}
    if len(units) > 1:
        fail("traces and schedules of --print-schedule have different units of time: draw them apart")
    from matplotlib.patches import Patch

    output = options.output or os.path.splitext(options.schedules[0])[0] + ".png"
    longest = max(s["makespan"] / passes_of_a_micro_batch(s) for s in schedules)
    # Inches for each unit of time: enough for the label of a pass, of which a stage has so many in a step.
    inches = 0.3 * max(passes_of_a_micro_batch(s) for s in schedules)
    if "unit" in schedules[0]:
        inches = 0.3 * max(len(stage) for s in schedules for stage in s["actions"]) * 1.5 / longest
    stages = [s["stages"] for s in schedules]
    wide = min(40, 3 + inches * longest)
    figure, axes = plt.subplots(len(schedules), 1, squeeze=False, sharex=True, constrained_layout=True,
                                figsize=(wide, 1.2 + 0.9 * len(stages) + 0.35 * sum(stages)),
                                gridspec_kw={"height_ratios": [n + 1 for n in stages]})
    drawn = 0
    for axis, schedule in zip(axes[:, 0], schedules):
        kinds, spans = {}, {}   # spans: a call for each pass takes minutes for 50,000
        for stage, kind, chunk, label, begin, end in boxes(schedule):
            kinds[kind] = COLOURS[kind]
            spans.setdefault((stage, darker(COLOURS[kind], chunk)), []).append((begin, end - begin))
            if (end - begin) * (wide - 3) / longest > 0.05 * len(label):   # inches: there is room for it
                axis.text((begin + end) / 2, stage, label, ha="center", va="center", fontsize=7)
            drawn += 1
        for (stage, colour), of_stage in spans.items():
            axis.broken_barh(of_stage, (stage - 0.45, 0.9), facecolors=colour, edgecolor="white", linewidth=0.8)
        axis.set_yticks(range(schedule["stages"]),
                        [f"stage {s}: idle {100 * idle:.1f}%" for s, idle in enumerate(schedule["idle"])])
        axis.invert_yaxis()
        axis.set_xlim(0, longest)
        axis.set_title(title(schedule), fontsize=10)
        axis.legend([Patch(color=c) for c in kinds.values()], [NAMES[k] for k in kinds], fontsize=7,
                    loc="center left", bbox_to_anchor=(1, 0.5))
    axes[-1, 0].set_xlabel(f"time, in {units.pop()}")
    save(figure, output, fail)
    print(f"plot: {output}, {drawn} passes")


if __name__ == "__main__":
    main()
