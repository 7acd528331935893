#!/usr/bin/env python3
"""Trains models of every family with --optimizer muon in random layouts of up to eight ranks, and with PyTorch in fp64:
transformers' model, AdamW, and Muon written out here. Compares the losses of 20 steps.

    python3 test/scripts/python/check_muon_layouts.py [--trainer ./train_gpt] [--count 40] [--seed 1]

A layout that the trainer refuses is drawn again, and counted.
Exit status: 0 all agree, 1 with the differences. Needs torch and transformers.
"""
import argparse
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile

import torch
from transformers.utils import logging

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), *[".."] * 3))
sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(ROOT, "test", "golden"))
from make_experts import margins, mixtral, olmoe, qwen2_moe, qwen3_moe   # noqa: E402
from make_families import Recipe, as_stored, gpt2, llama, load_model, make_model, qwen2, qwen3   # noqa: E402,F401
from make_golden import adamw, mean_loss, noisy_sequence, write_shard   # noqa: E402

STEPS, T, BATCH, VOCAB, LR, DECAY = 20, 16, 8, 61, 3e-3, 0.1
TOLERANCE = 1e-5      # of losses, relative
LEAST_MARGIN = 1e-5   # between the scores of the last expert that is chosen and of the next one
SIZES, MORE = (VOCAB, 32, 4, 2, 8, 4, 24, 64), {"tied": False, "theta": 1e4}
EXPERTS = {**MORE, "experts": 4, "per_token": 2}
MODELS = {
    "gpt2": gpt2(VOCAB, 4, 8, 4, 48, 64),
    "llama": llama(*SIZES, **MORE),
    "qwen2": qwen2(*SIZES, **{**MORE, "tied": True}),
    "qwen3": qwen3(*SIZES, **MORE),
    "mixtral": mixtral(*SIZES, **EXPERTS),
    "qwen2_moe": qwen2_moe(*SIZES, **EXPERTS, width=16, shared=24),
    "qwen3_moe": qwen3_moe(*SIZES, **EXPERTS, width=16, normalised=True),
    "olmoe": olmoe(*SIZES, **EXPERTS),
}
QUINTIC = [(3.4445, -4.7750, 2.0315)] * 5


# ---- The reference: Jordan et al. 2024, with decoupled decay and the scales of Liu et al. 2025 (Moonlight) -----------


def orthogonal(x):
    """Five Newton-Schulz steps."""
    wide = x if x.shape[0] <= x.shape[1] else x.T
    y = wide / wide.norm().clamp(min=1e-7)
    for a, b, c in QUINTIC:
        gram = y @ y.T
        y = a * y + (b * gram + c * gram @ gram) @ y
    return y if x.shape[0] <= x.shape[1] else y.T


def matrices(name, p, config, heads_apart):
    """The matrices (out, in) of a parameter, as views of it; none: it is AdamW's."""
    if not (".h." in name or ".layers." in name) or p.dim() < 2 or "gate.weight" in name.replace("gate_proj", ""):
        return []
    if p.dim() == 3:   # gates and ups of all experts, or their downs
        parts = 2 if "gate_up" in name else 1
        return [part for expert in p for part in expert.chunk(parts)]
    if config.model_type == "gpt2":
        whole = list(p.T.chunk(3)) if "c_attn" in name else [p.T]
    else:
        whole = [p]
    groups = getattr(config, "num_key_value_heads", None) or config.n_head
    if heads_apart and any(part in name for part in ("c_attn", "q_proj", "k_proj", "v_proj")):
        return [group for matrix in whole for group in matrix.chunk(groups)]
    return whole


class Muon:
    def __init__(self, model, draw):
        self.draw, self.momenta = draw, {}
        self.parts = {name: matrices(name, p.data, model.config, draw["--muon-heads"] == "apart")
                      for name, p in model.named_parameters()}
        self.model = model
        self.adamw = adamw([p for name, p in model.named_parameters() if not self.parts[name]])
        for group in self.adamw.param_groups:
            group["lr"] = LR

    @torch.no_grad()
    def step(self):
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        beta = float(self.draw["--muon-momentum"])
        for name, p in self.model.named_parameters():
            gradients = matrices(name, p.grad, self.model.config, self.draw["--muon-heads"] == "apart")
            for i, (w, g) in enumerate(zip(self.parts[name], gradients)):
                m = self.momenta.setdefault((name, i), torch.zeros_like(g))
                m.lerp_(g, 1 - beta)
                rows, columns = w.shape
                scale = 0.2 * max(rows, columns) ** 0.5 if self.draw["--muon-scale"] == "rms" else \
                    max(1, rows / columns) ** 0.5
                update = scale * orthogonal(g.lerp(m, beta))
                decays = w * update > 0 if "--cautious-decay" in self.draw else torch.ones_like(w, dtype=torch.bool)
                w.copy_(torch.where(decays, w * (1 - LR * DECAY), w) - LR * update)
        self.adamw.step()
        self.model.zero_grad()


# ---- Drawing and comparing ---------------------------------------------------------------------


def drawn_rule(choose):
    rule = {"--muon-scale": choose.choice(["rms", "spectral"]), "--muon-heads": choose.choice(["together", "apart"]),
            "--muon-momentum": choose.choice(["0.9", "0.95"])}
    if choose.random() < 0.3:
        rule["--cautious-decay"] = ""
    return rule


def drawn_layout(choose, sparse):
    """Options."""
    tp, pp, cp, ep = choose.choice([1, 1, 2]), choose.choice([1, 1, 2, 4]), choose.choice([1, 1, 2]), 1
    if sparse:
        ep = choose.choice([1, 2, 4])
    whole = tp * cp if not sparse else max(tp * cp, ep)
    ranks = pp * whole * choose.choice([1, 2, 4])
    if ranks > 8 or ranks == 1:
        return drawn_layout(choose, sparse)
    layout = {"--local-ranks": ranks, "--zero-stage": choose.randint(0, 3), "--batch-size": choose.choice([1, 2, 4]),
              "--recompute": choose.choice(["none", "block", "activation", "norm"])}
    more = {"--tp": tp, "--cp": cp, "--ep": ep, "--pp": pp}
    layout.update({name: degree for name, degree in more.items() if degree > 1})
    if tp > 1:
        layout.update({name: "" for name in ("--sequence-parallel", "--tp-overlap") if choose.random() < 0.4})
    if pp > 1:
        layout["--schedule"] = choose.choice(["gpipe", "1f1b", "zb-h1", "interleaved"])
        if layout["--schedule"] == "interleaved":
            layout["--pp-chunks"] = 2
    elif choose.random() < 0.4:
        layout["--dp-replicate"] = 2
    return layout


def command_of(trainer, folder, out, options):
    command = [trainer, "--model", folder, "--train-data", f"{folder}/train.bin", "--out-dir", out, "--no-shuffle",
               "--threads", "1", "--seq-len", str(T), "--total-batch-size", str(T * BATCH), "--max-steps", str(STEPS),
               "--optimizer", "muon", "--muon-products", "fp32", "--lr", str(LR), "--lr-schedule", "constant",
               "--beta2", "0.95", "--weight-decay", str(DECAY), "--grad-clip", "1"]
    for name, value in options.items():
        command += [name, str(value)] if value != "" else [name]
    return command


def reference(folder, rule, dtype=torch.float64):
    """The losses, and the smallest margin of a choice of experts."""
    model = load_model(folder).to(dtype)
    data = torch.frombuffer(bytearray(open(f"{folder}/train.bin", "rb").read()[1024:]), dtype=torch.uint16).long()
    optimizer, losses = Muon(model, rule), []
    with margins() as seen:
        for step in range(STEPS):
            loss = mean_loss(model, data, range(step * BATCH, (step + 1) * BATCH), T)
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
    return losses, min(seen, default=1.0)


def made_model(family, choose, folder, rule):
    """Writes a model. Returns its losses, and how far PyTorch's own in fp32 are from them: an iteration amplifies what
    rounding leaves of small singular values. Another model if a choice of experts is a matter of rounding."""
    while True:
        torch.manual_seed(choose.randrange(1 << 30))
        make_model(Recipe(family, MODELS[family], T, BATCH, 1)).save_pretrained(folder)
        write_shard(f"{folder}/train.bin", noisy_sequence(VOCAB, T * BATCH * STEPS + 1))
        losses, margin = reference(folder, rule)
        if margin >= LEAST_MARGIN:
            return losses, distance(reference(folder, rule, torch.float32)[0], losses)


def distance(ours, losses):
    return max(abs(a / b - 1) for a, b in zip(ours, losses, strict=True))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", default="./train_gpt")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    choose, refused, bad, largest = random.Random(options.seed), 0, 0, 0.0
    for number in range(options.count):
        family = list(MODELS)[number % len(MODELS)]
        with tempfile.TemporaryDirectory() as folder:
            rule = drawn_rule(choose)
            losses, rounding = made_model(family, choose, folder, rule)
            while True:
                layout = drawn_layout(choose, "experts" in str(MODELS[family]))
                if "experts" in str(MODELS[family]):
                    layout["--moe-aux-loss"] = 0
                command = command_of(options.trainer, folder, f"{folder}/run", {**rule, **layout})
                run = subprocess.run(command, capture_output=True, text=True)
                if run.returncode != 1:
                    break
                refused += 1
            what = f"{family}: " + shlex.join(str(x) for item in {**rule, **layout}.items() for x in item if x != "")
            if run.returncode != 0:
                print(f"{what}: status {run.returncode}: {run.stderr.strip()}")
                bad += 1
                continue
            with open(f"{folder}/run/metrics.jsonl") as f:
                ours = [line["loss"] for line in map(json.loads, f) if line["kind"] == "train"]
        worst, allowed = distance(ours, losses), max(TOLERANCE, 2 * rounding)
        largest = max(largest, worst)
        print(f"{worst:.1e} (PyTorch in fp32 {rounding:.1e})  {what}", flush=True)
        bad += worst > allowed
    print(f"{options.count} layouts, {refused} refused, losses differ by {largest:.1e} at most, {bad} by more than "
          f"{TOLERANCE} and twice what PyTorch's own in fp32 do")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
