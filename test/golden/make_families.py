#!/usr/bin/env python3
"""Makes tiny models of every family with transformers, and records 20 steps of PyTorch's AdamW on each:

    python3 test/golden/make_families.py                                      the committed ones, families/NAME/
    python3 test/golden/make_families.py --family qwen3 --seed 5 --out DIR    one with random, awkward sizes

A directory holds
    config.json, model.safetensors   the model, as saved by transformers; in shards with an index if "sharded".
                                     config.json has the form of transformers 5 or of the published models
    logits.safetensors               tokens (B, T) int32, and the model's logits (B, T, V) for them
    logits_documents.safetensors     if the model has an end of text: tokens (B, T) int32 with several of these in a
                                     row, positions (B, T) int32, and logits (B, T, V), each document computed alone.
                                     A document begins with an end of text. Its id: config.json's
                                     eos_token_id, and the file's metadata
    train.bin                        a token shard
    trajectory.json                  options: the run's command-line options; loss, grad_norm, lr by step;
                                     zero_gradient: [tensor, first, last] of the elements first to last - 1 whose true
                                     gradient is (nearly) zero: Adam's updates of these are rounding errors and
                                     cannot be compared
    final.safetensors                the weights after the last step

Matrices decay, vectors (norms, biases) do not. fp32 on a CPU, one thread, attention written out ("eager").
"""
import argparse
import dataclasses
import json
import os
import random
import shutil
import tempfile

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from make_golden import HERE, mean_loss, noisy_sequence, stored_weights, train, write_shard

FAMILIES = ("gpt2", "llama2", "llama3", "qwen2", "qwen3", "smollm2")
STEPS = 20


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A model to make and the run to record of it."""
    family: str
    config: dict              # of transformers; rope_theta and rope_scaling as in published models
    T: int                    # sequence length of training and of the logits
    batch: int                # sequences per step
    micro_batch: int          # of the trainer; PyTorch takes all sequences of a step at once
    published: bool = False   # config.json in the form of the published models, not of transformers 5
    sharded: bool = False     # model-00001-of-0000N.safetensors


# ---- The models ---------------------------------------------------------------------------------


def gpt2(V, H, D, L, F, positions, *, tied=True, eps=1e-5, std=0.2):
    return dict(model_type="gpt2", vocab_size=V, n_embd=H * D, n_head=H, n_layer=L, n_inner=F, n_positions=positions,
                tie_word_embeddings=tied, layer_norm_epsilon=eps, initializer_range=std, resid_pdrop=0.0,
                embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None)


def llama(V, C, H, Hkv, D, L, F, positions, *, tied, theta, eps=1e-5, std=0.2, scaling=None, end_of_text=None):
    """The architecture that all families but GPT-2 share."""
    return dict(model_type="llama", vocab_size=V, hidden_size=C, num_attention_heads=H, num_key_value_heads=Hkv,
                head_dim=D, num_hidden_layers=L, intermediate_size=F, max_position_embeddings=positions,
                tie_word_embeddings=tied, rope_theta=theta, rope_scaling=scaling, rms_norm_eps=eps,
                initializer_range=std, bos_token_id=None, eos_token_id=end_of_text)


def qwen2(*sizes, **more):
    return {**llama(*sizes, **more), "model_type": "qwen2", "use_sliding_window": False, "max_window_layers": 1}


def qwen3(*sizes, **more):
    return {**qwen2(*sizes, **more), "model_type": "qwen3", "attention_bias": False}


def llama3_scaling(factor, original):
    return dict(rope_type="llama3", factor=factor, low_freq_factor=1.0, high_freq_factor=4.0,
                original_max_position_embeddings=original)


# llama3_tiny: of the wavelengths 2 pi theta^(2 i / D), 6.3, 167, 4443 and 118143, the scaling leaves the first, blends
# the second, which lies between 400 / 4 and 400, and stretches the others.
COMMITTED = {
    "llama2_tiny": Recipe("llama2", llama(131, 20, 5, 5, 4, 2, 31, 41, tied=False, theta=1e4), 15, 4, 2),
    "llama3_tiny": Recipe("llama3", llama(137, 24, 3, 1, 8, 2, 27, 3200, tied=True, theta=5e5, end_of_text=17,
                                          scaling=llama3_scaling(8.0, 400)), 13, 4, 1, published=True),
    "qwen2_tiny": Recipe("qwen2", qwen2(139, 24, 4, 2, 6, 2, 31, 43, tied=True, theta=1e6, eps=1e-6), 14, 4, 4,
                         published=True),
    "qwen3_tiny": Recipe("qwen3", qwen3(131, 23, 4, 2, 10, 2, 29, 47, tied=True, theta=1e6, eps=1e-6), 15, 4, 2,
                         sharded=True),
    "smollm2_tiny": Recipe("smollm2", llama(149, 18, 3, 3, 6, 3, 29, 53, tied=True, theta=1e5), 16, 4, 2,
                           published=True),
}


def random_recipe(family, seed):
    choose = random.Random(f"{family} {seed}")
    V = choose.choice([131, 139, 149, 163, 181, 199, 211, 229, 251, 283, 307, 311])   # primes, to avoid round sizes
    H, D, L, F = choose.randint(1, 6), 2 * choose.randint(2, 8), choose.randint(2, 3), choose.randint(15, 60) * 2 + 1
    T, micro_batch = choose.randint(11, 33), choose.randint(1, 3)
    positions, tied = choose.randint(T, 3 * T), choose.random() < 0.5
    std, eps = choose.uniform(0.1, 0.25), choose.choice([1e-5, 1e-6])
    run = dict(T=T, batch=micro_batch * choose.randint(1, 3), micro_batch=micro_batch, sharded=choose.random() < 0.5,
               published=choose.random() < 0.5)
    if family == "gpt2":
        return Recipe(family, gpt2(V, H, D, L, F, positions, tied=tied, eps=eps, std=std), **run)
    theta, scaling, C = choose.choice([1e4, 5e5, 1e6]), None, H * D
    if family == "llama3":   # as above: the second wavelength is the one to blend
        D = max(D, 8)
        C, original = H * D, round(choose.uniform(1.2, 3.5) * 2 * torch.pi * theta**(2 / D))
        scaling = llama3_scaling(choose.choice([8.0, 32.0]), original)
        positions = round(scaling["factor"] * original)
    if family == "qwen3":
        C = choose.randint(13, 60)
    kv_heads = choose.choice([n for n in range(1, H + 1) if H % n == 0])
    build = {"qwen2": qwen2, "qwen3": qwen3}.get(family, llama)
    tied = {"llama2": False, "llama3": True, "smollm2": True}.get(family, tied)
    return Recipe(family, build(V, C, H, kv_heads, D, L, F, positions, tied=tied, theta=theta, eps=eps, std=std,
                                scaling=scaling), **run)


def written_out(model):
    """With experts computed one after another: grouped products take no odd sizes."""
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")
    return model


def make_model(recipe):
    """The model with random weights."""
    config = dict(recipe.config)
    if "rope_theta" in config:
        theta, scaling = config.pop("rope_theta"), config.pop("rope_scaling")
        config["rope_parameters"] = {"rope_theta": theta, **(scaling or {"rope_type": "default"})}
    model = written_out(AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32))
    with torch.no_grad():   # transformers initialises norms and biases to 1 and 0, which could hide bugs
        for p in model.parameters():
            if p.dim() == 1:
                p += 0.3 * torch.randn_like(p)
    return model


def write_published_config(path, recipe):
    """Rewrites config.json as transformers 4 wrote it, with the fields that the published files omit or add."""
    with open(path) as f:
        config = json.load(f)
    config.pop("dtype")
    config["torch_dtype"] = "float32"
    if recipe.family != "gpt2":
        config.pop("rope_parameters")
        config.update(rope_theta=recipe.config["rope_theta"], rope_scaling=recipe.config["rope_scaling"])
        config.pop("layer_types", None)
    if recipe.family in ("llama2", "qwen2", "smollm2", "mixtral", "qwen2_moe"):
        config.pop("head_dim", None)
    if recipe.family in ("qwen2", "qwen2_moe"):
        config["sliding_window"] = 5   # disabled by use_sliding_window
        config.pop("qkv_bias", None)
    if recipe.family == "llama2" and config["rope_theta"] == 1e4:
        config.pop("rope_theta")
    if recipe.family == "smollm2":
        config.update(is_llama_config=True, rope_interleaved=False)
    with open(path, "w") as f:
        json.dump(dict(sorted(config.items())), f, indent=2)
        f.write("\n")


def as_stored(model):
    """The weights by the names and in the shapes of transformers' files. In memory it has a layer's experts in one."""
    if not hasattr(model.config, "num_experts_per_tok"):
        return stored_weights(model)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(os.path.join(folder, "model.safetensors"))


def load_model(folder):
    return written_out(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager"))


# ---- Recordings ---------------------------------------------------------------------------------


def zero_gradients(model, data, recipe):
    """[tensor, first, last] where the true gradient is (nearly) zero.

    A key's bias adds the same to all scores of a query, to which the softmax is blind: everywhere without rotary
    positions; with them in the channels that the whole sequence turns by less than a hundredth of a radian. A router's
    weights, where a token has one expert and its score is divided by itself: that is 1, whatever the logits are."""
    ranges = []
    c = model.config
    one_expert = getattr(c, "num_experts_per_tok", 0) == 1 and getattr(c, "norm_topk_prob", c.model_type == "mixtral")
    for name, p in model.named_parameters():
        n = p.numel()
        if name.endswith("c_attn.bias"):   # of q, k and v
            ranges.append([name, n // 3, 2 * n // 3])
        if name.endswith("k_proj.bias"):   # in each head the first half of the channels is rotated with the second
            turns = model.model.rotary_emb.inv_freq * recipe.T
            fast, half = int((turns >= 0.01).sum()), turns.numel()
            if fast < half:
                ranges += [[name, first + fast, first + half] for first in range(0, n, half)]
        if name.endswith("mlp.gate.weight") and one_expert:
            ranges.append([name, 0, n])
    mean_loss(model, data, range(recipe.batch), recipe.T).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    largest = max(g.abs().max() for g in gradients.values())
    assert all(gradients[name].flatten()[first:last].abs().max() < 1e-3 * largest for name, first, last in ranges)
    if c.model_type == "mixtral":   # its files name the router otherwise
        ranges = [[name.replace("mlp.gate", "block_sparse_moe.gate"), first, last] for name, first, last in ranges]
    return ranges


def document_logits(model, end_of_text):
    """Tokens with several documents per row, and the logits of each document alone."""
    B, T, V = 2, 17, model.config.vocab_size
    tokens = torch.randint(V, (B, T))
    for row, ends in enumerate(([4, 5, 11, T - 1], [0, 8, 14])):   # two ends in a row, ends at either end of a row
        tokens[row][tokens[row] == end_of_text] += 1
        tokens[row, ends] = end_of_text
    positions, logits = torch.zeros(B, T, dtype=torch.int32), torch.zeros(B, T, V)
    for row in range(B):
        first = 0
        for begin in [*(tokens[row] == end_of_text).nonzero().flatten().tolist(), T]:
            if first < begin:
                positions[row, first:begin] = torch.arange(begin - first)
                logits[row, first:begin] = model(tokens[None, row, first:begin]).logits[0]
            first = begin
    assert (model(tokens).logits - logits).abs().max() > 0.1, "documents do not matter here"
    return {"tokens": tokens.int(), "positions": positions, "logits": logits}


def make_family(recipe, seed, folder):
    """Writes the directory."""
    torch.manual_seed(seed)
    shutil.rmtree(folder, ignore_errors=True)
    model = make_model(recipe)
    size = 4 * sum(p.numel() for p in model.parameters())
    model.save_pretrained(folder, max_shard_size=size // 3 if recipe.sharded else size + 1)
    os.remove(os.path.join(folder, "generation_config.json"))
    if recipe.published:
        write_published_config(os.path.join(folder, "config.json"), recipe)
    made, model = model, load_model(folder)   # the oracle uses the saved directory
    T, batch, V = recipe.T, recipe.batch, model.config.vocab_size
    tokens = noisy_sequence(V, T * batch * STEPS + 1)
    write_shard(os.path.join(folder, "train.bin"), tokens)
    data = torch.tensor(tokens)
    with torch.no_grad():
        some = torch.randint(V, (2, T))
        assert torch.allclose(made(some).logits, model(some).logits, atol=1e-4), "config.json lost something"
        save_file({"tokens": some.int(), "logits": model(some).logits}, os.path.join(folder, "logits.safetensors"))
        if (end_of_text := model.config.eos_token_id) is not None:
            save_file(document_logits(model, end_of_text), os.path.join(folder, "logits_documents.safetensors"),
                      metadata={"end_of_text": str(end_of_text)})
    options = {"dtype": "fp32", "batch-size": recipe.micro_batch, "seq-len": T, "total-batch-size": T * batch,
               "max-steps": STEPS, "lr": 1e-3, "warmup-steps": 5, "lr-schedule": "cosine", "final-lr-frac": 0.1,
               "weight-decay": 0.1, "beta1": 0.9, "beta2": 0.95, "adam-eps": 1e-8, "grad-clip": 1}
    zero = zero_gradients(model, data, recipe)
    with open(os.path.join(folder, "trajectory.json"), "w") as f:
        json.dump({"options": options, **train(model, data, T, batch, STEPS), "zero_gradient": zero}, f, indent=1)
        f.write("\n")
    save_file(as_stored(model), os.path.join(folder, "final.safetensors"))


def read_options(doc, families):
    """--family, --seed and --out, or none of them."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=families)
    parser.add_argument("--seed", type=int, help="of sizes, weights and tokens")
    parser.add_argument("--out", metavar="DIR", help="is replaced")
    options = parser.parse_args()
    given = [options.family, options.seed, options.out]
    if None in given and any(value is not None for value in given):
        parser.error("--family, --seed and --out go together; without them the committed directories are made")
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    return options


def main():
    options = read_options(__doc__, FAMILIES)
    if options.family:
        make_family(random_recipe(options.family, options.seed), options.seed, options.out)
        return
    for seed, (name, recipe) in enumerate(COMMITTED.items(), start=1):
        make_family(recipe, seed, os.path.join(HERE, "families", name))


if __name__ == "__main__":
    main()
