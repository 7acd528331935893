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

The committed directories of BALANCED also have, by the name of what balances their experts, NAME.json and
NAME.safetensors: the trajectory and final weights of a training run, and what its steps record of experts, by a plain
PyTorch reference that is written here: transformers has no biases, no capacity, and another balancing loss.
"""
import contextlib
import json
import math
import os
import random

import torch
from safetensors.torch import load_file, save_file
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from make_families import STEPS, Recipe, as_stored, llama, load_model, make_family, qwen2, qwen3, read_options
from make_golden import HERE, adamw, learning_rate, mean_loss

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
    if more["per_token"] == 1 and (family == "mixtral" or normalised):
        more["per_token"] = 2   # one normalised weight is 1: its router has no gradient but rounding, which Adam enlarges
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


# What balances the experts: options of the trainer. Rates and coefficients are made a little larger until no choice of
# the run is close.
BALANCED = {
    "losses": {"moe-aux-loss": 0.2, "moe-z-loss": 0.05},
    "biases": {"moe-bias-rate": 0.02},
    "capacity": {"moe-dispatch": "capacity", "moe-capacity-factor": 0.9, "moe-aux-loss": 0.1},
}


class Balance:
    """Replaces the routers of a model, and adds up what a step records of them."""

    def __init__(self, model, T, options):
        self.T, self.model, self.options = T, model, options
        self.k = model.config.num_experts_per_tok
        self.normalised = getattr(model.config, "norm_topk_prob", True)
        self.gates = [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]
        self.E = self.gates[0].weight.shape[0]
        self.biases = [torch.zeros(self.E) for _ in self.gates]
        self.smallest_margin = 1.0
        for layer, gate in enumerate(self.gates):
            gate.forward = lambda hidden, layer=layer: self.route(hidden.reshape(-1, hidden.shape[-1]), layer)

    def start_step(self):
        self.balance, self.z, self.entropy, self.dropped = [], [], [], []
        self.counts = torch.zeros(len(self.gates), self.E)

    def route(self, hidden, layer):
        logits = hidden.float() @ self.gates[layer].weight.float().T
        scores = logits.softmax(-1)
        keys = scores + self.biases[layer]
        ordered = keys.detach().sort(-1, descending=True).values
        self.smallest_margin = min(self.smallest_margin, (ordered[:, self.k - 1] - ordered[:, self.k]).min().item())
        chosen = keys.topk(self.k, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if self.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        keep = torch.ones_like(weights)
        for first in range(0, len(hidden), self.T):   # one sequence after the other
            sequence = slice(first, first + self.T)
            of = torch.nn.functional.one_hot(chosen[sequence].flatten(), self.E)   # in the order (position, choice)
            counts, before = of.sum(0).float(), (of.cumsum(0) - of)[of.bool()]
            if "moe-capacity-factor" in self.options:
                capacity = math.ceil(self.options["moe-capacity-factor"] * self.T * self.k / self.E)
                keep[sequence] = (before < capacity).view(-1, self.k).float()
            self.counts[layer] += counts
            self.balance.append(self.E * (counts / (self.T * self.k) * scores[sequence].mean(0)).sum())
        self.dropped.append(1 - keep.mean().item())
        self.z.append((logits.logsumexp(-1)**2).mean())
        self.entropy.append(-(scores * scores.log()).sum(-1).mean().item())
        return logits, weights * keep, chosen

    def end_step(self):
        """What the trainer writes to metrics.jsonl."""
        if rate := self.options.get("moe-bias-rate"):
            for bias, counts in zip(self.biases, self.counts):
                bias += rate * torch.sign(counts.mean() - counts)
        of_mean = self.counts / self.counts.mean(-1, keepdim=True)
        lists = {"moe_balance_loss": self.balance, "moe_z_loss": self.z, "router_entropy": self.entropy,
                 "dropped": self.dropped}
        return {**{key: sum(torch.as_tensor(v).item() for v in values) / len(values) for key, values in lists.items()},
                "expert_largest": of_mean.max().item(), "expert_smallest": of_mean.min().item()}

    def loss(self):
        return (self.options.get("moe-aux-loss", 0) * sum(self.balance) / len(self.balance)
                + self.options.get("moe-z-loss", 0) * sum(self.z) / len(self.z))


def make_balanced(recipe, name, folder, larger=1.0):
    model = load_model(folder)
    of_balance = {key: round(larger * value, 6) if key.endswith(("-loss", "-rate")) else value
                  for key, value in BALANCED[name].items()}
    balance = Balance(model, recipe.T, of_balance)
    with open(os.path.join(folder, "trajectory.json")) as f:
        options = {**json.load(f)["options"], **of_balance}
    with open(os.path.join(folder, "train.bin"), "rb") as f:
        data = torch.frombuffer(bytearray(f.read()[1024:]), dtype=torch.uint16).long()
    optimizer = adamw(list(model.parameters()))
    trajectory = {"loss": [], "grad_norm": []}
    for step in range(1, STEPS + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        balance.start_step()
        loss = mean_loss(model, data, range((step - 1) * recipe.batch, step * recipe.batch), recipe.T)
        optimizer.zero_grad()
        (loss + balance.loss()).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        for key, value in {"loss": loss.item(), "grad_norm": norm.item(), **balance.end_step()}.items():
            trajectory.setdefault(key, []).append(value)
    if balance.smallest_margin < LEAST_MARGIN["random"]:
        return make_balanced(recipe, name, folder, 1.05 * larger)
    assert name != "capacity" or max(trajectory["dropped"]) > 0.05, "nothing is dropped"
    with open(os.path.join(folder, name + ".json"), "w") as f:
        json.dump({"options": options, **trajectory, "biases": [b.tolist() for b in balance.biases],
                   "smallest_margin": balance.smallest_margin}, f, indent=1)
        f.write("\n")
    save_file(as_stored(model), os.path.join(folder, name + ".safetensors"))


def make_without_ties(recipe, seed, folder, kind):
    while not make(recipe, seed, folder, LEAST_MARGIN[kind]):
        seed += 1000


def main():
    options = read_options(__doc__, FAMILIES)
    if options.family:
        make_without_ties(random_recipe(options.family, options.seed), options.seed, options.out,
                          "random")
        return
    for seed, (name, recipe) in enumerate(COMMITTED.items(), start=1):
        folder = os.path.join(HERE, "experts", name)
        make_without_ties(recipe, seed, folder, "committed")
        for balanced in BALANCED if name in ("mixtral_tiny", "qwen2_moe_tiny") else ():
            make_balanced(recipe, balanced, folder)


if __name__ == "__main__":
    main()
