#!/usr/bin/env python3
"""Compares fp8 with other people's: casts to E4M3 and E5M2 with ml_dtypes', on all 65,536 bf16 numbers; and 20 steps of
training with --products fp8-block, fp8, mxfp8 and fp8-tensor with PyTorch, whose linear layers round their operands here: losses
within 1e-4, dense and with experts. A wrong recipe of each must not agree.

    python3 test/scripts/python/check_fp8.py [--train-gpt ./train_gpt]

With --kinds only some of them. Exit status: 0 all agree, 1 with the differences. Needs torch, transformers and ml_dtypes, and g++ for the casts.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile

import ml_dtypes
import numpy as np
import torch
from safetensors.torch import load_file
from transformers.utils import logging

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), *[".."] * 3))
sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(ROOT, "test", "golden"))
from make_experts import mixtral   # noqa: E402
from make_families import Recipe, as_stored, llama, make_model   # noqa: E402
from make_golden import mean_loss, noisy_sequence, train, write_shard   # noqa: E402

# A number that rounding errors of fp32 push across the middle between two fp8 numbers changes by 1/16, and what follows
# from it pushes others: in a model of two layers, two runs of PyTorch, one with 1e-7 of noise on its weights, have losses
# that differ by 3e-3 from the second step on, at rates from 1e-5 to 1e-3. So the model has one layer, and the rate is so
# small that the steps are the forward and the backward of twenty batches.
STEPS, LEARNING_RATE, LOSS_TOLERANCE, GRADIENT_TOLERANCE = 20, 1e-9, 1e-4, 3e-2
CASTS = """#include <cstdio>
#include "core/fp8.h"
template <class F> void all() {
  for (uint32_t i = 0; i < 65536; ++i) std::putchar(F::of(std::bit_cast<float>(i << 16)).bits);
}
int main() { all<llmc::e4m3>(), all<llmc::e5m2>(); }
"""


def check_casts(folder):
    with open(f"{folder}/casts.cpp", "w") as f:
        f.write(CASTS)
    subprocess.run(["g++", "-std=c++20", "-O1", f"-I{ROOT}/llmc", f"{folder}/casts.cpp", "-o", f"{folder}/casts"],
                   check=True)
    ours = np.frombuffer(subprocess.run([f"{folder}/casts"], check=True, capture_output=True).stdout, np.uint8)
    numbers = (np.arange(65536, dtype=np.uint32) << 16).view(np.float32)
    agree = True
    for name, dtype, of_type in (("E4M3", ml_dtypes.float8_e4m3fn, ours[:65536]),
                                 ("E5M2", ml_dtypes.float8_e5m2, ours[65536:])):
        largest = float(ml_dtypes.finfo(dtype).max)
        with np.errstate(all="ignore"):
            theirs = np.clip(numbers, -largest, largest).astype(dtype).astype(np.float32)   # ours saturate
        found = of_type.view(dtype).astype(np.float32)
        finite = np.isfinite(numbers)
        differ = int((found.view(np.uint32) != theirs.view(np.uint32))[finite].sum() + (~np.isnan(found[~finite])).sum())
        print(f"casts to {name}: {differ} of {len(numbers)} differ from ml_dtypes'")
        agree &= differ == 0
    return agree


class Numbers:
    """What a product reads: x (R, C) rounded in blocks of rows x columns."""
    def __init__(self, dtype, largest, least_scale):
        self.dtype, self.largest, self.least_scale = dtype, largest, least_scale

    def round(self, x, rows, columns):
        R, C = x.shape
        rows, columns = min(rows, R), min(columns, C)
        padded = torch.zeros(-(-R // rows) * rows, -(-C // columns) * columns)
        padded[:R, :C] = x
        blocks = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
        largest = blocks.abs().amax((1, 3), keepdim=True)
        scale = torch.full_like(largest, self.least_scale)
        while (small := largest > self.largest * scale).any():
            scale[small] *= 2
        return ((blocks / scale).to(self.dtype).float() * scale).view_as(padded)[:R, :C].contiguous()


WHOLE = 1 << 40
E4M3 = Numbers(torch.float8_e4m3fn, 448.0, 2.0 ** -117)
E5M2 = Numbers(torch.float8_e5m2, 57344.0, 2.0 ** -110)


class Recipe8:
    """One scale for `block` numbers along the sum, and for as many beside it in squares; with whole, for an operand."""
    def __init__(self, block=128, squares=True, gradients=E4M3, whole=False):
        self.block, self.squares, self.gradients = WHOLE if whole else block, squares, gradients
        self.beside = WHOLE if whole else 1


RECIPES = {"fp8-block": Recipe8(), "fp8": Recipe8(gradients=E5M2), "mxfp8": Recipe8(block=32, squares=False),
           # (PyTorch's layers have q, k and v apart, each with a scale of its own.)
           "fp8-tensor": Recipe8(gradients=E5M2, whole=True)}
# Gradients of the other type. (Blocks of another size are hardly noticed: scales are powers of two, so they only decide
# which numbers are so small that they have fewer bits. The tests of the ops check them bit for bit.)
WRONG = {"fp8": Recipe8(), "mxfp8": Recipe8(32, False, E5M2), "fp8-block": Recipe8(gradients=E5M2),
         "fp8-tensor": Recipe8(whole=True)}


def product_in(recipe):
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, of_expert):
            ctx.save_for_backward(x, weight)
            ctx.of_expert = of_expert
            across = recipe.block if recipe.squares else 1
            return E4M3.round(x, recipe.beside, recipe.block) @ E4M3.round(weight, across, recipe.block).T

        @staticmethod
        def backward(ctx, dout):
            x, weight = ctx.saved_tensors
            b, one, g = recipe.block, recipe.beside, recipe.gradients
            dx = g.round(dout, one, b) @ E4M3.round(weight, b, b if recipe.squares else 1)
            if ctx.of_expert:   # rows keep the blocks along themselves
                return dx, g.round(dout, one, b).T @ E4M3.round(x, one, b), None
            return dx, g.round(dout, b, one).T @ E4M3.round(x, b, one), None
    return Product.apply


def linear_in(recipe, model):
    """torch.nn.functional.linear with products in fp8, but for the head and routers."""
    plain, product = torch.nn.functional.linear, product_in(recipe)
    kept = {p.data_ptr() for name, p in model.named_parameters()
            if "lm_head" in name or "embed" in name or name.endswith(("gate.weight", "router.weight"))}

    def linear(x, weight, bias=None):
        if weight.data_ptr() in kept or x.shape[:-1].numel() == 0:
            return plain(x, weight, bias)
        out = product(x.reshape(-1, x.shape[-1]), weight, weight._base is not None)
        out = out.view(*x.shape[:-1], -1)
        return out if bias is None else out + bias
    return linear


def with_products(recipe, config, use):
    """use(a model with these products)"""
    torch.manual_seed(4)
    model = make_model(config)
    plain = torch.nn.functional.linear
    torch.nn.functional.linear = linear_in(recipe, model)
    try:
        return use(model)
    finally:
        torch.nn.functional.linear = plain


def gradients_of(recipe, config, T, data):
    """Of the first step, by the names of the checkpoint."""
    def step(model):
        before = {name: t.clone() for name, t in as_stored(model).items()}
        mean_loss(model, data, range(2), T).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= p.grad
        return {name: before[name] - t for name, t in as_stored(model).items()}
    return with_products(recipe, config, step)


def losses_of(recipe, config, T, data):
    return with_products(recipe, config, lambda model: train(model, data, T, 2, STEPS, peak=LEARNING_RATE)["loss"])


def distances(ours, theirs):
    return {name: ((t - theirs[name]).norm() / theirs[name].norm()).item() for name, t in ours.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train-gpt", default=os.path.join(ROOT, "train_gpt"), help="default: the one of this tree")
    parser.add_argument("--kinds", nargs="+", choices=RECIPES, default=list(RECIPES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    # Squares of 128 x 128 weights belong to one parameter each, as the trainer's do to q, k and v together.
    T, V = 128, 61
    sizes = (V, 128, 2, 2, 64, 1, 256, T)
    models = {"dense": Recipe("llama2", llama(*sizes, tied=False, theta=10000.0, std=0.1), T, 2, 1),
              "sparse": Recipe("mixtral", mixtral(*sizes, tied=False, theta=10000.0, std=0.1, experts=4, per_token=2),
                               T, 2, 1)}
    with tempfile.TemporaryDirectory() as folder:
        agree = check_casts(folder)
        torch.manual_seed(3)
        tokens = noisy_sequence(V, T * 2 * STEPS + 1)
        write_shard(f"{folder}/train.bin", tokens)
        data = torch.tensor(tokens)
        for kind, config in models.items():
            torch.manual_seed(4)
            make_model(config).save_pretrained(f"{folder}/{kind}")
            for name in options.kinds:
                recipe = RECIPES[name]

                def run(*more):
                    subprocess.run(
                        [options.train_gpt, "--model", f"{folder}/{kind}", "--train-data", f"{folder}/train.bin",
                         "--out-dir", f"{folder}/out", "--restart", "--no-shuffle", "--dtype", "fp32", "--products",
                         name, "--batch-size", "1", "--seq-len", str(T), "--total-batch-size", str(2 * T),
                         "--local-ranks", "1", *(["--moe-aux-loss", "0"] if kind == "sparse" else []), *more],
                        check=True, capture_output=True)
                # Plain descent by the whole gradient: the weights say what it was.
                run("--optimizer", "sgd", "--max-steps", "1", "--lr", "1", "--warmup-steps", "0", "--lr-schedule",
                    "constant", "--weight-decay", "0", "--grad-clip", "0")
                before, after = (load_file(f"{path}/model.safetensors")
                                 for path in (f"{folder}/{kind}", f"{folder}/out/step-000001"))
                ours = {tensor: before[tensor] - after[tensor] for tensor in after}
                right = distances(ours, gradients_of(recipe, config, T, data))
                wrong = distances(ours, gradients_of(WRONG[name], config, T, data))
                worst, least = max(right, key=right.get), max(wrong.values())
                print(f"{kind}, --products {name}: gradients differ from PyTorch's by at most {right[worst]:.1e} "
                      f"({worst}), of a wrong recipe by {least:.1e}", flush=True)
                agree &= right[worst] <= GRADIENT_TOLERANCE < least
                run("--max-steps", str(STEPS), "--lr", f"{LEARNING_RATE:.9f}", "--warmup-steps", "5", "--lr-schedule",
                    "cosine", "--final-lr-frac", "0.1", "--weight-decay", "0.1", "--beta1", "0.9", "--beta2", "0.95",
                    "--adam-eps", "1e-8", "--grad-clip", "1")
                with open(f"{folder}/out/metrics.jsonl") as f:
                    losses = [line["loss"] for line in map(json.loads, f) if line["kind"] == "train"]
                error = max(abs(a / b - 1)
                            for a, b in zip(losses, losses_of(recipe, config, T, data), strict=True))
                print(f"  losses of {STEPS} steps differ by at most {error:.1e}", flush=True)
                agree &= error <= LOSS_TOLERANCE
    print("agrees" if agree else "differs")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
