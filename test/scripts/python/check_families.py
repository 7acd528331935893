#!/usr/bin/env python3
"""Trains models of every family, with random weights and awkward sizes, with the trainer and with PyTorch's AdamW, and
compares loss, gradient norm and learning rate at each of 20 steps. Loads the trainer's checkpoint with transformers and
compares configuration, weights and logits with PyTorch's.

    python3 test/scripts/python/check_families.py --seed 7 [--family qwen3] [--trainer-options '--local-ranks 2 --zero-stage 3']

golden/make_families.py and make_experts.py make the models, which depend only on seed and family. --model DIR uses such a directory
unchanged.
Exit status: 0 all agree, 1 with the differences. Needs torch and transformers.
"""
import argparse
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import tempfile

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), *[".."] * 3))
sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(ROOT, "test", "golden"))
import make_experts   # noqa: E402
import make_families   # noqa: E402
from make_families import as_stored, load_model, written_out   # noqa: E402

DENSE, SPARSE = make_families.FAMILIES, make_experts.FAMILIES

TOLERANCES = {"loss": 1e-4, "grad_norm": 1e-4, "lr": 1e-12}   # relative, at every step
TENSOR_TOLERANCE = 1e-4                                       # relative norm, of weights and logits
# Fields in which a checkpoint may differ: its origin and format, and settings that no forward pass reads.
FREE_SETTINGS = {"_name_or_path", "architectures", "dtype", "transformers_version", "use_cache", "n_ctx",
                 "max_window_layers", "pretraining_tp", "is_llama_config", "rope_interleaved"}


def distance(ours, theirs):
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm().clamp_min(1e-30)).item()


def same(ours, theirs):
    """Equality of settings; the trainer has single-precision numbers."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(same(ours[name], theirs[name]) for name in ours)
    if isinstance(ours, float) and isinstance(theirs, float):
        return math.isclose(ours, theirs, rel_tol=1e-6)
    return ours == theirs


def train(trainer, folder, golden, out, more):
    """Runs the trainer, with the options `more` last; returns the lines of its steps, or None and the reason."""
    command = [trainer, "--model", folder, "--train-data", f"{folder}/train.bin", "--out-dir", out, "--no-shuffle",
               "--threads", "2"]
    for name, value in golden["options"].items():
        command += [f"--{name}", str(value)]
    command += more
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        return None, f"exit status {result.returncode}: {result.stderr.strip()} ({shlex.join(command)})"
    with open(f"{out}/metrics.jsonl") as f:
        return [line for line in map(json.loads, f) if line["kind"] == "train"], ""


def compare_steps(lines, golden, report):
    steps = len(golden["loss"])
    if [line["step"] for line in lines] != list(range(1, steps + 1)):
        report(f"metrics.jsonl has the steps {[line['step'] for line in lines]}, expected 1 to {steps}")
        return
    for name, tolerance in TOLERANCES.items():
        errors = [abs(line[name] / value - 1) for line, value in zip(lines, golden[name])]
        worst = max(range(steps), key=errors.__getitem__)
        report(f"{name}: worst at step {worst + 1}: {lines[worst][name]} against {golden[name][worst]}",
               errors[worst], tolerance)


def compare_checkpoint(checkpoint, folder, golden, report):
    """Compares `checkpoint`, loaded by transformers, with the final weights of the golden directory."""
    model, loading = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager",
                                                          output_loading_info=True)
    model = written_out(model)
    for kind, names in loading.items():
        if names:
            report(f"transformers loads the checkpoint with {kind}: {names}")
    oracle = load_model(folder)
    ours, theirs = (m.config.to_dict() for m in (model, oracle))
    for config in (ours, theirs):
        if "hidden_size" in config and config.get("head_dim") is None:   # Qwen2's default
            config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    for name in sorted((ours.keys() | theirs.keys()) - FREE_SETTINGS):
        if not same(ours.get(name), theirs.get(name)):
            report(f"config.json: {name} is {ours.get(name)}, of the original {theirs.get(name)}")

    final, loaded = load_file(f"{folder}/final.safetensors"), as_stored(model)
    if loaded.keys() != final.keys():
        report(f"tensors of only one side: {sorted(loaded.keys() ^ final.keys())}")
        return
    with tempfile.TemporaryDirectory() as with_final:
        shutil.copy(f"{folder}/config.json", with_final)
        shutil.copy(f"{folder}/final.safetensors", f"{with_final}/model.safetensors")
        oracle = load_model(with_final)
    tokens = load_file(f"{folder}/logits.safetensors")["tokens"].long()
    with torch.no_grad():
        report("logits", distance(model(tokens).logits, oracle(tokens).logits), TENSOR_TOLERANCE)
    for name, weight in final.items():
        if loaded[name].shape != weight.shape:
            report(f"{name} has the shape {tuple(loaded[name].shape)}, of the original {tuple(weight.shape)}")
            continue
        keep = torch.ones(weight.numel(), dtype=torch.bool)
        for tensor, first, last in golden["zero_gradient"]:
            if tensor == name:
                keep[first:last] = False
        report(f"weight {name}", distance(loaded[name].flatten()[keep], weight.flatten()[keep]), TENSOR_TOLERANCE)


def check(name, folder, options):
    """Whether trainer and PyTorch agree on this directory; prints the largest error of each kind and all failures."""
    worst, failures = {}, []

    def report(what, error=None, tolerance=None):
        if error is None or not error <= tolerance:   # NaN is a failure
            failures.append(what if error is None else f"{what}: relative error {error:.2e}, at most {tolerance:.0e}")
        if error is not None:
            kind = what.split(" ")[0].rstrip(":")
            worst[kind] = max(worst.get(kind, 0.0), error)

    with open(f"{folder}/trajectory.json") as f:
        golden = json.load(f)
    with tempfile.TemporaryDirectory() as out:
        lines, problem = train(options.train_gpt, folder, golden, out, shlex.split(options.trainer_options))
        if lines is None:
            report(problem)
        else:
            compare_steps(lines, golden, report)
            compare_checkpoint(f"{out}/step-{len(golden['loss']):06}", folder, golden, report)
    print(f"{name}: {'differs' if failures else 'agrees'}; relative errors up to",
          ", ".join(f"{kind} {error:.1e}" for kind, error in worst.items()) or "(none compared)", flush=True)
    for failure in failures:
        print(f"  {failure}", file=sys.stderr, flush=True)
    return not failures


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--seed", type=int, help="of sizes, weights and tokens")
    what.add_argument("--model", metavar="DIR", help="a directory that make_families.py or make_experts.py made")
    parser.add_argument("--family", choices=DENSE + SPARSE, action="append", help="may be repeated; default: all")
    parser.add_argument("--train-gpt", default=os.path.join(ROOT, "train_gpt"),
                        help="default: the one of this tree")
    parser.add_argument("--trainer-options", default="", help="more options for the trainer, in one argument")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    if options.model:
        return 0 if check(options.model, options.model, options) else 1
    agree = True
    for family in options.family or DENSE + SPARSE:
        with tempfile.TemporaryDirectory() as folder:
            if family in DENSE:
                make_families.make_family(make_families.random_recipe(family, options.seed), options.seed, folder)
            else:
                recipe = make_experts.random_recipe(family, options.seed)
                make_experts.make_without_ties(recipe, options.seed, folder, "random")
            agree &= check(f"{family} --seed {options.seed}", folder, options)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
