#!/usr/bin/env python3
"""train_gpt against PyTorch on this machine's CPU: tokens per second, and where the time goes.

    dev/bench/run.sh                                     both cases, fp32 and bf16: less than ten minutes on two cores
    dev/bench/run.sh --cases d4 --dtypes bf16 --rounds 9
    dev/bench/run.sh --out dev/results/bench.md

The programs take turns (ours, PyTorch eager, PyTorch compiled, ours, ...), because a machine is not equally fast at all
times; a ratio is of two turns of one round, and the table has the median over the rounds. PyTorch processes stay alive
between their turns, so that they compile once; ours is started for each turn, and its first two steps do not count.
PyTorch in bf16 means autocast over fp32 weights or everything in bf16, whichever is faster here; ours keeps fp32 master
weights and optimizer states. Both train on the same batch. gpt2:124M needs 10 GB of memory. PYTHON names a Python that
has torch.
"""

import argparse
import array
import contextlib
import dataclasses
import datetime
import json
import math
import os
import pathlib
import platform
import random
import re
import resource
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import typing

ROOT = pathlib.Path(__file__).resolve().parents[2]
SKIPPED_STEPS = 2   # of ours in each turn: memory is touched for the first time, products are prepared


@dataclasses.dataclass
class Case:
    what: str
    options: list    # of the trainer
    B: int
    T: int
    vocab_size: int
    pytorch_vocab_size: int   # what PyTorch's users would choose
    steps: int       # in a turn


CASES = {
    "d4": Case("the model of `make run`", ["--model", "d4", "--n-embd", "128", "--vocab-size", "257"],
               B=16, T=128, vocab_size=257, pytorch_vocab_size=257, steps=20),
    "gpt2:124M": Case("GPT-2", ["--model", "gpt2:124M"],
                      B=4, T=256, vocab_size=50257, pytorch_vocab_size=50304, steps=2),
}

# Which of our ops and of PyTorch's do the same work: the first pattern that fits the name. PyTorch's `sum` is the
# gradient of a bias in eager mode, as is linear_backward_bias; its `mm` and `addmm` are both directions.
FAMILIES = [
    ("matrix products", r"linear_(forward|backward_(input|weight))|aten::(mm|addmm|bmm|mkl_linear|mkldnn_.*|linear)"),
    ("gradient of biases", r"linear_backward_bias|aten::sum"),
    ("attention", r"attention_.*|aten::_scaled_dot_product.*"),
    ("GELU", r"gelu_.*|aten::gelu.*"),
    ("layernorm", r"layernorm_.*|aten::native_layer_norm.*"),
    ("cross-entropy", r"cross_entropy|add_losses|aten::(_log_softmax|nll_loss).*"),
    ("embedding", r"embedding_.*|aten::(embedding.*|index_select)"),
    ("AdamW", r"adamw_update|aten::_fused_adamw_|aten::_foreach_.*|Optimizer\..*"),
    ("norm and clipping", r"square_sum|clip_control|aten::(linalg_vector_norm|mul_?|stack|clamp|reciprocal)"),
    ("additions", r"residual_forward|aten::add_?"),
    ("zeroing, copies, conversions", r"zero|convert.*|aten::(copy_|cat|clone|fill_|zero_|_to_copy|to)"),
    ("everything else", r".*"),
]


def fail(message):
    sys.exit(f"dev/bench: {message}")


def say(message):
    print(f"[{datetime.datetime.now():%H:%M:%S}] {message}", file=sys.stderr, flush=True)


@dataclasses.dataclass
class Turn:
    """The steps of one program in one go."""
    ms: list
    losses: list
    others: float   # processors that other programs kept busy meanwhile: they make the times longer

    def median(self):
        return statistics.median(self.ms)


def own_seconds(pid=None):
    """Processor seconds of the children that have ended and, with a pid, of that live process."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = usage.ru_utime + usage.ru_stime
    if pid:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds


class OtherLoad:
    """with OtherLoad(pid) as load: ...; load.processors: how many were busy with something else."""

    def __init__(self, pid=None):
        self.pid = pid

    def read(self):
        with open("/proc/stat") as file:
            ticks = [int(x) for x in file.readline().split()[1:9]]   # user nice system idle iowait irq softirq steal
        per_second = os.sysconf("SC_CLK_TCK")
        return (sum(ticks) - ticks[3] - ticks[4]) / per_second - own_seconds(self.pid), sum(ticks) / per_second

    def __enter__(self):
        self.begin = self.read()
        return self

    def __exit__(self, *_):
        busy, total = (after - before for after, before in zip(self.read(), self.begin))
        self.processors = max(0.0, busy / max(total, 1e-9) * os.cpu_count())


# ---- Ours ------------------------------------------------------------------------------------------------------------

@dataclasses.dataclass
class TrainerRun:
    turn: Turn
    config: dict     # the model's config.json
    ops: dict        # with --profile: name -> ms a step
    ops_text: str    # the same as the trainer prints it


def run_trainer(o, case, dtype, steps, profile=False):
    out = o.temp / "out"
    shutil.rmtree(out, ignore_errors=True)
    command = [o.trainer, "--train-data", o.temp / f"{case.vocab_size}.bin", *case.options, "--batch-size", case.B,
               "--seq-len", case.T, "--dtype", dtype, "--max-steps", steps + SKIPPED_STEPS, "--threads", o.threads,
               "--overfit-batch", "--lr-schedule", "constant", "--out-dir", out]
    command += ["--profile"] * profile
    with OtherLoad() as load:
        done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        fail(f"the trainer ended with status {done.returncode}: {done.stderr.strip()[-1000:]}\n  "
             + " ".join(map(str, command)))
    with open(out / "metrics.jsonl") as file:
        lines = [line for line in map(json.loads, file) if line["kind"] == "train"]
    turn = Turn([line["ms"] for line in lines[SKIPPED_STEPS:]], [line["loss"] for line in lines], load.processors)
    config = json.loads(next(out.glob("step-*/config.json")).read_text())
    rows = re.findall(r"^  (\w+) +([\d.]+) ms a step.*$", done.stdout, re.MULTILINE)
    text = "\n".join(re.findall(r"^  \w+ +[\d.]+ ms a step.*$", done.stdout, re.MULTILINE))
    shutil.rmtree(out)
    return TrainerRun(turn, config, {name: float(ms) for name, ms in rows}, text)


# ---- PyTorch ---------------------------------------------------------------------------------------------------------

class PyTorch:
    """A live pytorch_gpt2.py. `broken` says why it is none, for instance no C++ compiler for torch.compile."""

    def __init__(self, o, case, config, dtype, weights, compiled):
        self.name = {"fp32": "fp32", "bf16": "all bf16" if weights == "bf16" else "autocast"}[dtype]
        options = {"--n-layer": config["n_layer"], "--n-head": config["n_head"], "--n-embd": config["n_embd"],
                   "--n-positions": config["n_positions"], "--vocab-size": case.pytorch_vocab_size,
                   "--batch-size": case.B, "--seq-len": case.T, "--threads": o.threads, "--dtype": dtype,
                   "--weights": weights, "--warmup": SKIPPED_STEPS, "--tokens": o.temp / f"{case.vocab_size}.bin"}
        command = [sys.executable, ROOT / "dev/bench/pytorch_gpt2.py", "--serve", *["--compile"] * compiled]
        for option in options.items():
            command += option
        self.errors = tempfile.TemporaryFile("w+", dir=o.temp)
        self.process = subprocess.Popen(list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=self.errors, text=True, env={**os.environ, "OMP_NUM_THREADS": str(o.threads)})
        self.broken = None
        self.turns = []
        self.ready = self.read_until("ready")

    def read_until(self, kind):
        """All objects up to one of that kind; empty where the process has ended."""
        objects = []
        for line in self.process.stdout:
            if line.startswith("{"):   # the profiler prints lines of its own
                objects.append(json.loads(line))
                if objects[-1]["kind"] == kind:
                    return objects
        self.errors.seek(0)
        lines = self.errors.read().strip().splitlines() or ["it ended without a word"]
        self.broken = next((line for line in reversed(lines) if "Error" in line), lines[-1])
        return []

    def ask(self, command, kind):
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.read_until(kind)

    def run(self, steps):
        """One turn, also kept in self.turns."""
        with OtherLoad(self.process.pid) as load:
            objects = self.ask(f"steps {steps}", "turn")
        if self.broken:
            fail(f"PyTorch stopped: {self.broken}")
        taken = [x for x in objects if x["kind"] == "step"]
        self.turns.append(Turn([x["ms"] for x in taken], [x["loss"] for x in taken], load.processors))

    def profile(self, steps):
        objects = self.ask(f"profile {steps}", "ops")
        return {x["name"]: x["ms"] for x in objects[-1]["ops"]} if objects else {}

    def close(self):
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.terminate()
        self.process.wait()
        self.errors.close()


# ---- Measuring -------------------------------------------------------------------------------------------------------

@dataclasses.dataclass
class Result:
    case: str
    dtype: str
    tokens: int
    ours: list                        # a Turn for each round
    eager: PyTorch
    compiled: typing.Optional[PyTorch]
    notes: list
    ours_ops: dict = dataclasses.field(default_factory=dict)
    ours_ops_text: str = ""
    pytorch_ops: dict = dataclasses.field(default_factory=dict)


def tokens_per_second(result, turns):
    return result.tokens / statistics.median(t.median() for t in turns) * 1e3


def choose_pytorch(o, case, config, dtype, compiled, steps, open_processes, notes):
    """Starts the variants one after the other and keeps the fastest; None where none runs."""
    best = None
    mode = "compiled" if compiled else "eager"
    tried = []
    for weights in ["fp32"] if dtype == "fp32" else ["fp32", "bf16"]:
        server = PyTorch(o, case, config, dtype, weights, compiled)
        if server.broken:
            say(f"  PyTorch {mode} {server.name} does not run: {server.broken}")
            notes.append(f"PyTorch {mode} ({server.name}) did not run: {server.broken}")
            server.close()
            continue
        server.run(steps)
        rate = case.B * case.T / server.turns[0].median() * 1e3
        say(f"  PyTorch {mode} {server.name}: {rate:,.0f} tokens/s at first")
        tried.append(f"{server.name} {rate:,.0f}")
        loser = server
        if best is None or server.turns[0].median() < best.turns[0].median():
            loser, best = best, server
        if loser is not None:
            loser.close()
    if len(tried) > 1:
        notes.append(f"PyTorch {mode}, one turn each, tokens/s: {', '.join(tried)}; the faster one took part")
    if best is not None:
        best.turns.clear()
        open_processes.callback(best.close)
    return best


def check_losses(case, ours, pytorch, notes):
    """Both train the same model on the same batch: the losses of the first two steps are alike."""
    for mine, theirs in zip(ours[:SKIPPED_STEPS], pytorch):
        if abs(mine - theirs) > 0.03 * theirs:
            notes.append(f"WARNING: ours has loss {mine:.3f} where PyTorch has {theirs:.3f}: not the same training")


def measure(o, name, dtype):
    case = CASES[name]
    steps = o.steps or case.steps
    say(f"{name} {dtype}: warming up")
    first = run_trainer(o, case, dtype, 1)
    with contextlib.ExitStack() as open_processes:
        notes = []
        eager, compiled = (choose_pytorch(o, case, first.config, dtype, x, steps, open_processes, notes)
                           for x in (False, True))
        if eager is None:
            fail(f"PyTorch does not run here: {notes[-1]}")
        check_losses(case, first.turn.losses, eager.ready[-1]["losses"], notes)
        result = Result(name, dtype, case.B * case.T, [], eager, compiled, notes)
        for r in range(o.rounds):
            result.ours.append(run_trainer(o, case, dtype, steps).turn)
            for server in filter(None, (eager, compiled)):
                server.run(steps)
            rates = [f"{label} {result.tokens / turns[-1].median() * 1e3:,.0f}" for label, turns in
                     [("ours", result.ours), ("eager", eager.turns)] + [("compiled", compiled.turns)] * bool(compiled)]
            say(f"  round {r + 1} of {o.rounds}, tokens/s: {', '.join(rates)}; others kept "
                f"{max(others(result)[-1:]):.1f} processors busy")
        say("  time by op")
        profiled = run_trainer(o, case, dtype, steps, profile=True)
        result.ours_ops, result.ours_ops_text = profiled.ops, profiled.ops_text
        result.pytorch_ops = eager.profile(steps)
    return result


# ---- Reporting -------------------------------------------------------------------------------------------------------

def others(result):
    """The most that other programs took in a turn of each round."""
    turns = zip(*[result.ours, result.eager.turns] + ([result.compiled.turns] if result.compiled else []))
    return [max(t.others for t in turn) for turn in turns]


def table(head, rows):
    """Markdown that lines up; columns of numbers to the right."""
    widths = [max(len(str(row[i])) for row in [head] + rows) for i in range(len(head))]
    right = [all(str(row[i])[:1].isdigit() or row[i] == "-" for row in rows) for i in range(len(head))]
    def line(row):
        return "| " + " | ".join(str(x).rjust(w) if r else str(x).ljust(w)
                                 for x, w, r in zip(row, widths, right)) + " |"
    rule = "|" + "|".join("-" * (w + 1) + (":" if r else "-") for w, r in zip(widths, right)) + "|"
    return "\n".join([line(head), rule, *map(line, rows)])


def speed_row(result):
    sides = {"eager": result.eager, "compiled": result.compiled}
    rates = {mode: tokens_per_second(result, side.turns) for mode, side in sides.items() if side}
    best = sides[max(rates, key=rates.get)]
    ratios = [theirs.median() / mine.median() for mine, theirs in zip(result.ours, best.turns)]
    def cell(mode):
        return f"{rates[mode]:,.0f} ({sides[mode].name})" if mode in rates else "-"
    mine = [t.median() for t in result.ours]
    return [result.case, result.dtype, f"{tokens_per_second(result, result.ours):,.0f}", cell("eager"),
            cell("compiled"), f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}",
            f"{(max(mine) - min(mine)) / statistics.median(mine):.0%}", f"{max(others(result)):.1f}"]


def speed_table(results):
    head = ["case", "dtype", "ours, tokens/s", "PyTorch eager", "PyTorch compiled", "ours / PyTorch's best",
            "of the rounds", "spread of ours", "busy with others"]
    return table(head, [speed_row(r) for r in results])


def family_of(name):
    return next(family for family, pattern in FAMILIES if re.fullmatch(pattern, name))


def family_table(result):
    """Ours and PyTorch's eager mode by kind of work, ms a step."""
    sums = {family: [0.0, 0.0] for family, _ in FAMILIES}
    for side, ops in enumerate((result.ours_ops, result.pytorch_ops)):
        for name, ms in ops.items():
            sums[family_of(name)][side] += ms
    totals = [max(sum(s[i] for s in sums.values()), 1e-9) for i in (0, 1)]
    rows = [[family, f"{a:.2f}", f"{a / totals[0]:.0%}", f"{b:.2f}", f"{b / totals[1]:.0%}", f"{a - b:+.2f}"]
            for family, (a, b) in sorted(sums.items(), key=lambda x: -x[1][0])]
    rows.append(["all", f"{totals[0]:.2f}", "100%", f"{totals[1]:.2f}", "100%", f"{totals[0] - totals[1]:+.2f}"])
    return table(["work", "ours, ms a step", "share", f"PyTorch eager ({result.eager.name}), ms", "share",
                  "ours longer by, ms"], rows)


def output_of(*command):
    return subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, text=True).stdout.strip()


def processor_name():
    with open("/proc/cpuinfo") as file:
        names = re.findall(r"^model name\s*: (.*)$", file.read(), re.MULTILINE)
    return names[0] if names else platform.machine()


def report(o, results):
    cases = "; ".join(f"{name}: {c.what}, {' '.join(c.options)}, B={c.B} T={c.T}, turns of {o.steps or c.steps} steps"
                      for name, c in CASES.items() if name in o.cases)
    parts = [f"# {datetime.date.today()}: train_gpt against PyTorch on a CPU", table(["what", "value"], [
        ["processor", f"{processor_name()}, {os.cpu_count()} processors, {o.threads} threads for each program"],
        ["system", f"{platform.system()} {platform.release()}, Python {platform.python_version()}"],
        ["ours", output_of(o.trainer, "--version").replace("\n", "; ")],
        ["PyTorch", f"{results[0].eager.ready[-1]['torch']}, AdamW {results[0].eager.ready[-1]['optimizer']}"],
        ["command", "dev/bench/run.sh " + " ".join(sys.argv[1:])],
        ["cases", cases]]), speed_table(results),
        f"Medians of {o.rounds} round(s). `of the rounds`: the smallest and the largest ratio. `spread of ours`: the "
        "slowest less\nthe fastest round, of the median. `busy with others`: processors that other programs used in "
        "the worst round."]
    parts += [f"- {r.case} {r.dtype}: {note}" for r in results for note in r.notes]
    for r in results:
        parts += [f"## {r.case} {r.dtype}: where the time goes", family_table(r), "Our ops (`--profile`):",
                  f"```\n{r.ours_ops_text}\n```"]
    return "\n\n".join(parts).replace("\n\n- ", "\n- ") + "\n"


# ---- main ------------------------------------------------------------------------------------------------------------

def write_shard(path, vocab_size, tokens):
    """Random tokens in llm.c's format."""
    make = random.Random(1)
    values = array.array("H", (make.randrange(vocab_size) for _ in range(tokens)))
    if sys.byteorder == "big":
        values.byteswap()
    path.write_bytes(struct.pack("<256i", 20240520, 1, tokens, *[0] * 253) + values.tobytes())


def positive(text):
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


def words(allowed):
    def parse(text):
        unknown = [word for word in text.split(",") if word not in allowed]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(allowed)}")
        return [word for word in allowed if word in text.split(",")]
    return parse


def parse_options():
    parser = argparse.ArgumentParser(prog="dev/bench/run.sh", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = ", ".join(f"{name} {case.steps}" for name, case in CASES.items())
    parser.add_argument("--cases", type=words(list(CASES)), default=list(CASES), metavar="LIST",
                        help=f"of {','.join(CASES)} [all]")
    parser.add_argument("--dtypes", type=words(["fp32", "bf16"]), default=["fp32", "bf16"], metavar="LIST",
                        help="of fp32,bf16 [both]")
    parser.add_argument("--rounds", type=positive, default=3, metavar="N", help="turns of each program [%(default)s]")
    parser.add_argument("--steps", type=positive, metavar="N", help=f"steps that count in a turn [{usual}]")
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)), metavar="N",
                        help="of each program [%(default)s: the processors it may use]")
    parser.add_argument("--trainer", type=pathlib.Path, default=ROOT / "train_gpt", metavar="FILE",
                        help="the program to measure [train_gpt]")
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE", help="write the results there, too, as Markdown")
    return parser.parse_args()


def main():
    o = parse_options()
    if not os.access(o.trainer, os.X_OK):
        fail(f"there is no program {o.trainer}: run make first")
    if o.out and not o.out.parent.is_dir():
        fail(f"--out {o.out}: there is no directory {o.out.parent}")
    with tempfile.TemporaryDirectory(prefix="train_gpt_bench.") as temp:
        o.temp = pathlib.Path(temp)
        for case in (CASES[name] for name in o.cases):
            write_shard(o.temp / f"{case.vocab_size}.bin", case.vocab_size, 4 * case.B * case.T + 1)
        results = [measure(o, name, dtype) for name in o.cases for dtype in o.dtypes]
        text = report(o, results)
    print(text, end="")
    if o.out:
        o.out.write_text(text)
        say(f"written to {o.out}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
