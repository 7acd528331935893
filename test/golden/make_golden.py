#!/usr/bin/env python3
"""Makes the golden files of the tests from PyTorch and transformers, the oracles:

    python3 -m pip install torch transformers safetensors
    python3 test/golden/make_golden.py

ops.safetensors   inputs, outputs and gradients of every op ("OP.NAME"), fp32
gpt2_tiny/        a tiny GPT-2 with awkward sizes as transformers saves it (config.json, model.safetensors), tokens
                  (train.bin, a token shard), and what 20 steps of PyTorch's AdamW make of it in fp32: trajectory.json (loss,
                  gradient norm, learning rate by step) and final.safetensors; logits.safetensors: those of the first model
                  for the token behind the first 20

The committed files were made with torch 2.15.0 and transformers 5.23.0 on a CPU.
"""
import json
import math
import os
import struct

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel

HERE = os.path.dirname(os.path.abspath(__file__))


def random(*shape, scale=1.0):
    return (torch.randn(*shape) * scale).requires_grad_()


def make_ops():
    """One case an op; upstream gradients are random, "d" names a gradient."""
    torch.manual_seed(1)
    golden = {}

    def record(op, tensors):
        for name, tensor in tensors.items():
            golden[f"{op}.{name}"] = tensor.detach().clone().contiguous()

    def case(op, inputs, out, extra=None):
        dout = torch.randn_like(out)
        out.backward(dout)
        tensors = {**inputs, "out": out, "dout": dout, **(extra or {})}
        tensors.update({"d" + k: v.grad for k, v in inputs.items() if v.grad is not None})
        record(op, tensors)

    tokens = torch.tensor([3, 0, 10, 3, 3, 7, 1], dtype=torch.int32)
    positions = torch.tensor([0, 1, 2, 3, 0, 1, 2], dtype=torch.int32)
    wte, wpe = random(11, 36), random(5, 36)
    case("embedding", {"wte": wte, "wpe": wpe}, wte[tokens.long()] + wpe[positions.long()],
         {"tokens": tokens, "positions": positions})

    x, weight, bias = random(7, 36), random(36), random(36)
    case("layernorm", {"x": x, "weight": weight, "bias": bias}, F.layer_norm(x, (36,), weight, bias, 1e-5))

    x, weight, bias = random(7, 36), random(50, 36), random(50)
    case("linear", {"x": x, "weight": weight, "bias": bias}, F.linear(x, weight, bias))

    x = random(7, 36, scale=3)
    case("gelu", {"x": x}, F.gelu(x, approximate="tanh"))

    for name, heads, kv_heads in (("attention", 3, 3), ("grouped_attention", 4, 2)):
        B, T, D = 2, 37, 12
        qkv = random(B * T, (heads + 2 * kv_heads) * D)
        q, k, v = qkv.view(B, T, -1, D).transpose(1, 2).split([heads, kv_heads, kv_heads], dim=1)
        k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        case(name, {"qkv": qkv}, out.transpose(1, 2).reshape(B * T, heads * D))

    logits = random(7, 31, scale=2)
    targets = torch.tensor([0, 30, 5, 5, 17, 2, 9], dtype=torch.int32)
    losses = F.cross_entropy(logits, targets.long(), reduction="none")
    losses.mean().backward()
    record("cross_entropy", {"logits": logits, "targets": targets, "losses": losses, "dlogits": logits.grad})

    p = random(133)
    record("adamw", {"before": p})
    optimizer = torch.optim.AdamW([p], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in (1, 2, 3):
        p.grad = torch.randn_like(p)
        record("adamw", {f"gradient{step}": p.grad})
        optimizer.step()
        record("adamw", {f"after{step}": p})
    save_file(golden, os.path.join(HERE, "ops.safetensors"))


def learning_rate(step, peak=1e-3, warmup=5, max_steps=20, final_frac=0.1):
    """Of update `step`, counted from 1, as llmc/train/lr_schedule.h defines it."""
    if step <= warmup:
        return peak * step / warmup
    done = (step - 1 - warmup) / (max_steps - warmup)
    lowest = peak * final_frac
    return lowest + 0.5 * (1 + math.cos(math.pi * done)) * (peak - lowest)


def make_trajectory():
    T, batch, steps, vocab = 33, 8, 20, 211
    folder = os.path.join(HERE, "gpt2_tiny")
    torch.manual_seed(2)
    config = GPT2Config(vocab_size=vocab, n_positions=48, n_embd=36, n_head=3, n_layer=3, n_inner=100, resid_pdrop=0.0,
                        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None)
    model = GPT2LMHeadModel(config)
    with torch.no_grad():  # biases and norms as transformers makes them are 0 and 1: bugs could hide
        for name, p in model.named_parameters():
            if p.dim() == 1:
                p += 0.1 * torch.randn_like(p)
    model.save_pretrained(folder)
    os.path.exists(os.path.join(folder, "generation_config.json")) and os.remove(os.path.join(folder, "generation_config.json"))

    # A sequence to learn, with noise: each token follows from the one before.
    n = T * batch * steps + 1
    tokens = [7]
    noise = torch.rand(n)
    for i in range(1, n):
        tokens.append((tokens[-1] * 5 + 3) % vocab if noise[i] < 0.8 else int(noise[i] * 1e6) % vocab)
    with open(os.path.join(folder, "train.bin"), "wb") as f:
        f.write(struct.pack("<256i", 20240520, 1, n, *[0] * 253))
        f.write(struct.pack(f"<{n}H", *tokens))

    data = torch.tensor(tokens)
    with torch.no_grad():
        save_file({"logits": model(data[None, :20]).logits[0, -1].contiguous()}, os.path.join(folder, "logits.safetensors"))
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
                                  lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    trajectory = {"loss": [], "grad_norm": [], "lr": []}
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        first = (step - 1) * batch
        rows = torch.stack([data[k * T:k * T + T + 1] for k in range(first, first + batch)])
        logits = model(rows[:, :-1]).logits
        loss = F.cross_entropy(logits.reshape(-1, vocab), rows[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        for key, value in (("loss", loss.item()), ("grad_norm", norm.item()), ("lr", learning_rate(step))):
            trajectory[key].append(value)
    with open(os.path.join(folder, "trajectory.json"), "w") as f:
        json.dump(trajectory, f, indent=1)
    state = {k: v.detach().contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    save_file(state, os.path.join(folder, "final.safetensors"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    make_ops()
    make_trajectory()
