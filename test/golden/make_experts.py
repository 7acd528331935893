#!/usr/bin/env python3
"""Makes tiny models with experts as make_families.py makes dense ones, with the same files:

    python3 test/golden/make_experts.py                                       the committed ones, experts/NAME/
    python3 test/golden/make_experts.py --family olmoe --seed 5 --out DIR     one with random, awkward sizes

Beside those files a directory holds
    fused.safetensors       the weights of model.safetensors as transformers 5 has them in memory: one tensor of the
                            gates and ups of all experts of a layer, and one of their downs
    gradients.safetensors   of the loss of the first step, before clipping, by the names of model.safetensors
    router.safetensors      for the tokens of logits.safetensors: router_logits (layers with experts, B T, E); aux_loss
                            (1), transformers' balancing loss over all of it; aux_loss_by_layer (layers, B), the same
                            of one layer and one sequence alone
and trajectory.json also smallest_margin: the least difference, in all steps and layers, between the scores of the last
expert that the router chooses for a token and of the next one. Where it is below rounding errors, the choice and with
it the trajectory depend on these; models are made until it is not. The balancing loss is not in the training loss.
"""
import argparse
import contextlib
import json
import os
import random

import torch
from safetensors.torch import load_file, save_file
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.utils import logging

from make_families import Recipe, as_stored, llama, load_model, make_family, qwen2, qwen3
from make_golden import HERE, mean_loss

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
LEAST_MARGIN = {"committed": 3e-5, "random": 1e-5}   # the larger, the longer the search


def mixtral(*sizes, experts, per_token, **more):
    return {**llama(*sizes, **more), "model_type": "mixtral", "num_local_experts": experts,
            "num_experts_per_tok": per_token, "router_aux_loss_coef": 0.02}


def qwen2_moe(*sizes, experts, per_token, width, shared, normalised=False, dense=(), every=1, **more):
    return {**qwen2(*sizes, **more), "model_type": "qwen2_moe", "num_experts": experts,
            "num_experts_per_tok": per_token, "moe_intermediate_size": width,
            "shared_expert_intermediate_size": shared, "norm_topk_prob": normalised,
            "mlp_only_layers": list(dense), "decoder_sparse_step": every}


def qwen3_moe(*sizes, **more):
    config = {**qwen2_moe(*sizes, shared=None, **more), "model_type": "qwen3_moe", "attention_bias": False}
    del config["shared_expert_intermediate_size"]
    return config


def olmoe(*sizes, experts, per_token, normalised=False, **more):
    config = {**llama(*sizes, **more), "model_type": "olmoe", "num_experts": experts,
              "num_experts_per_tok": per_token, "norm_topk_prob": normalised, "pad_token_id": None}
    del config["head_dim"]
    return config


COMMITTED = {
    "mixtral_tiny": Recipe("mixtral", mixtral(67, 18, 3, 1, 6, 2, 11, 41, tied=False, theta=1e6, experts=5,
                                              per_token=2), 15, 4, 2, published=True),
    "qwen2_moe_tiny": Recipe("qwen2_moe", qwen2_moe(61, 16, 4, 2, 4, 3, 13, 43, tied=True, theta=1e4, eps=1e-6,
                                                    experts=6, per_token=3, width=7, shared=10, dense=[1]), 14, 4, 4,
                             published=True),
    "qwen3_moe_tiny": Recipe("qwen3_moe", qwen3_moe(59, 17, 4, 2, 6, 4, 15, 47, tied=False, theta=1e6, eps=1e-6,
                                                    experts=7, per_token=2, width=9, normalised=True, every=2), 13, 4,
                             1, sharded=True),
    "olmoe_tiny": Recipe("olmoe", olmoe(71, 18, 3, 1, 6, 2, 8, 53, tied=False, theta=1e4, experts=8, per_token=3), 16,
                         4, 2),
}


def random_recipe(family, seed):
    choose = random.Random(f"{family} {seed}")
    V, E = choose.choice([61, 67, 71, 79, 83, 97]), choose.randint(3, 12)
    H, D, L, F = choose.randint(1, 4), 2 * choose.randint(2, 6), choose.randint(2, 3), choose.randint(3, 12) * 2 + 1
    T, micro_batch = choose.randint(7, 13), choose.randint(1, 2)
    sizes = [V, H * D if family != "qwen3_moe" else choose.randint(13, 40), H,
             choose.choice([n for n in range(1, H + 1) if H % n == 0]), D, L, F, choose.randint(T, 3 * T)]
    more = dict(tied=choose.random() < 0.5, theta=choose.choice([1e4, 1e6]), eps=choose.choice([1e-5, 1e-6]),
                std=choose.uniform(0.1, 0.25), experts=E, per_token=choose.randint(1, min(E - 1, 4)))
    layers = dict(width=choose.randint(3, 15), every=choose.randint(1, 2),
                  dense=choose.choice([[], [0]]))   # the last layer of two, at least, has experts
    normalised = choose.random() < 0.5
    if layers["every"] == 2:
        layers["dense"] = []
    config = {"mixtral": lambda: mixtral(*sizes, **more),
              "qwen2_moe": lambda: qwen2_moe(*sizes, **more, **layers, shared=choose.randint(3, 20),
                                             normalised=normalised),
              "qwen3_moe": lambda: qwen3_moe(*sizes, **more, **layers, normalised=normalised),
              "olmoe": lambda: olmoe(*sizes, **more, normalised=normalised)}[family]()
    return Recipe(family, config, T, micro_batch * choose.randint(1, 2), micro_batch,
                  published=choose.random() < 0.5, sharded=choose.random() < 0.5)


@contextlib.contextmanager
def margins():
    """A list, to which every router that runs adds its smallest margin."""
    seen = []

    def hook(module, inputs, output):
        if type(module).__name__.endswith("TopKRouter"):
            scores = output[0].detach().double().softmax(dim=-1).sort(dim=-1, descending=True).values
            k = output[2].shape[-1]
            if k < scores.shape[-1]:
                seen.append((scores[:, k - 1] - scores[:, k]).min().item())

    handle = torch.nn.modules.module.register_module_forward_hook(hook)
    try:
        yield seen
    finally:
        handle.remove()


def router_results(model, tokens):
    B, k = len(tokens), model.config.num_experts_per_tok
    out = model(tokens, output_router_logits=True)
    logits = torch.stack(out.router_logits)   # (layers, B T, E)
    E = logits.shape[-1]
    by_layer = [[load_balancing_loss_func((sequence,), E, k) for sequence in layer.view(B, -1, E)] for layer in logits]
    return {"router_logits": logits, "aux_loss": out.aux_loss.reshape(1), "aux_loss_by_layer": torch.tensor(by_layer)}


def make(recipe, seed, folder, least_margin):
    """Writes the directory; whether its margin is large enough."""
    with margins() as seen:
        make_family(recipe, seed, folder)
    smallest = min(seen, default=1.0)
    path = os.path.join(folder, "trajectory.json")
    with open(path) as f:
        trajectory = json.load(f)
    with open(path, "w") as f:
        json.dump({**trajectory, "smallest_margin": smallest}, f, indent=1)
        f.write("\n")
    if smallest < least_margin:
        return False
    model = load_model(folder)
    with torch.no_grad():
        tokens = load_file(os.path.join(folder, "logits.safetensors"))["tokens"].long()
        save_file(router_results(model, tokens), os.path.join(folder, "router.safetensors"))
    fused = {k: v.contiguous() for k, v in model.state_dict().items()
             if k != "lm_head.weight" or not model.config.tie_word_embeddings}
    assert any(k.endswith(".experts.gate_up_proj") for k in fused), "this version of transformers fuses no experts"
    save_file(fused, os.path.join(folder, "fused.safetensors"))
    with open(os.path.join(folder, "train.bin"), "rb") as f:
        data = torch.frombuffer(bytearray(f.read()[1024:]), dtype=torch.uint16).long()
    mean_loss(model, data, range(recipe.batch), recipe.T).backward()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.grad)
    save_file(as_stored(model), os.path.join(folder, "gradients.safetensors"))
    return True


def make_without_ties(recipe, seed, folder, kind):
    while not make(recipe, seed, folder, LEAST_MARGIN[kind]):
        seed += 1000


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=FAMILIES)
    parser.add_argument("--seed", type=int, help="of sizes, weights and tokens")
    parser.add_argument("--out", metavar="DIR", help="is replaced")
    options = parser.parse_args()
    given = [options.family, options.seed, options.out]
    if None in given and any(value is not None for value in given):
        parser.error("--family, --seed and --out go together; without them the committed directories are made")
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    if options.family:
        make_without_ties(random_recipe(options.family, options.seed), options.seed, options.out,
                          "random")
        return
    for seed, (name, recipe) in enumerate(COMMITTED.items(), start=1):
        make_without_ties(recipe, seed, os.path.join(HERE, "experts", name), "committed")


if __name__ == "__main__":
    main()
