#!/usr/bin/env python3
"""Trains the tiny models in test/golden with --parametrization completep, for which the trainer folds all multipliers
into the weights, and with PyTorch, where they are multipliers: of logits, attention scores and what blocks add to the
residual stream. Rates, decay and epsilon there are those of the CompleteP paper's Table 1. Compares the losses of ten
steps of AdamW, and what transformers computes with the trainer's last checkpoint with PyTorch's model.

    python3 test/scripts/python/check_parametrization.py [--trainer ./train_gpt] DIR...

Exit status: 0 all agree, 1 with the differences. Needs torch and transformers.
"""
import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile

import torch
from transformers.utils import logging

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), *[".."] * 3))
sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(ROOT, "test", "golden"))
from make_families import load_model   # noqa: E402
from make_golden import mean_loss   # noqa: E402

STEPS, LR, DECAY, EPS = 10, 3e-3, 0.5, 1e-4   # decay and epsilon so large that a wrong one shows
TOLERANCE = 1e-6                              # of losses, relative; a checkpoint rounds weights to fp32


def is_router(name):
    return name.endswith(("mlp.gate.weight", "block_sparse_moe.gate.weight", "shared_expert_gate.weight"))


def is_branch(name):
    return any(part in name for part in ("c_proj.", "o_proj.", "down_proj"))


def with_multipliers(model, M, L, D):
    """The same function, with multipliers as modules' factors and weights divided by them. M, L, D: width, depth and head
    size over those of the base."""
    c, weights = model.config, dict(model.named_parameters())
    gpt2 = c.model_type == "gpt2"
    normed = any("q_norm" in name for name in weights)
    with torch.no_grad():
        for name, p in weights.items():
            if is_branch(name):
                p *= L
            if is_router(name) or name.startswith("lm_head.") or \
                    (c.tie_word_embeddings and name.startswith(("transformer.ln_f.", "model.norm."))):
                p *= M
            if "q_norm" in name or (not normed and "q_proj" in name):
                p *= D ** 0.5
            if "c_attn" in name:   # queries, keys, values
                p[..., :c.n_embd] *= D ** 0.5

    def divided(value, by):
        return (value[0] / by, *value[1:]) if isinstance(value, tuple) else value / by

    for layer in (model.transformer.h if gpt2 else model.model.layers):
        attention = layer.attn if gpt2 else layer.self_attn
        attention.scaling = attention.scaling / D ** 0.5
        for branch in (attention, layer.mlp):
            branch.register_forward_hook(lambda module, inputs, output: divided(output, L))
        for name in ("gate", "shared_expert_gate"):
            if not gpt2 and hasattr(layer.mlp, name):
                getattr(layer.mlp, name).register_forward_pre_hook(lambda module, inputs: divided(inputs, M))
    model.lm_head.register_forward_pre_hook(lambda module, inputs: divided(inputs, M))
    return model


def groups(model, M, L):
    """Table 1, alpha = 1."""
    for name, p in model.named_parameters():
        block = ".h." in name or ".layers." in name
        hidden = block and p.dim() > 1 and not is_router(name)
        yield {"params": [p], "lr": LR / M if hidden else LR, "eps": EPS / M / (L if block else 1),
               "weight_decay": 0 if p.dim() == 1 else DECAY * M if hidden else DECAY}


def check(trainer, folder, out):
    with open(f"{folder}/config.json") as f:
        config = json.load(f)
    width = config.get("n_embd", config.get("hidden_size"))
    heads = config.get("n_head", config.get("num_attention_heads"))
    head_size = config.get("head_dim") or width // heads
    layers = config.get("n_layer", config.get("num_hidden_layers"))
    T, batch = 16, 2
    base = max(1, width // 4), 1, max(1, head_size // 2)   # need not be a model's
    M, L, D = width / base[0], layers / base[1], head_size / base[2]
    command = [trainer, "--model", folder, "--train-data", f"{folder}/train.bin", "--out-dir", out, "--no-shuffle",
               "--threads", "2", "--seq-len", str(T), "--batch-size", str(batch), "--max-steps", str(STEPS),
               "--lr", str(LR), "--lr-schedule", "constant", "--beta2", "0.95", "--weight-decay", str(DECAY),
               "--adam-eps", str(EPS), "--grad-clip", "0", "--parametrization", "completep",
               "--base-width", str(base[0]), "--base-depth", str(base[1]), "--base-head-size", str(base[2])]
    if "num_experts_per_tok" in config:
        command += ["--moe-aux-loss", "0"]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode != 0:
        return f"{run.stderr.strip()} ({shlex.join(command)})"
    with open(f"{out}/metrics.jsonl") as f:
        ours = [line["loss"] for line in map(json.loads, f) if line["kind"] == "train"]
    data = torch.from_file(f"{folder}/train.bin", dtype=torch.int16, size=os.path.getsize(f"{folder}/train.bin") // 2)
    data = data[512:].long()
    model = with_multipliers(load_model(folder).double(), M, L, D)
    optimizer = torch.optim.AdamW(list(groups(model, M, L)), betas=(0.9, 0.95))
    worst = 0.0
    for step in range(STEPS):
        loss = mean_loss(model, data, range(step * batch, (step + 1) * batch), T)
        worst = max(worst, abs(ours[step] / loss.item() - 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    saved = load_model(f"{out}/step-{STEPS:06}").double()
    with torch.no_grad():
        ids = data[None, :T]
        a, b = saved(ids).logits, model(ids).logits
    logits = ((a - b).norm() / b.norm()).item()
    print(f"{os.path.basename(folder)}: losses {worst:.1e}, logits of the checkpoint {logits:.1e}")
    if not (worst < TOLERANCE and logits < 20 * TOLERANCE):
        return f"losses differ by {worst:.1e} at most, logits by {logits:.1e}"
    return ""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", metavar="DIR")
    parser.add_argument("--trainer", default="./train_gpt")
    options = parser.parse_args()
    logging.disable_progress_bar()
    bad = 0
    for folder in options.folders:
        with tempfile.TemporaryDirectory() as out:
            fault = check(options.trainer, folder.rstrip("/"), f"{out}/run")
        if fault:
            print(f"{folder}: {fault}")
            bad = 1
    sys.exit(bad)


if __name__ == "__main__":
    main()
