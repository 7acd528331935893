#!/usr/bin/env python3
"""The peer: the trainer's step of GPT-2 in PyTorch. Prints one line of JSON: the milliseconds of each timed step.

    python3 dev/bench/pytorch_gpt2.py --layers 12 --heads 12 --channels 768 --vocab 50257 --batch 4 --seq-len 256

The same model (pre-norm blocks, tied table, no dropout), loss, gradient clipping and AdamW with decay on matrices only, on
random tokens. Attention is F.scaled_dot_product_attention, AdamW is fused.
"""
import argparse
import contextlib
import json
import time

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, channels, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.qkv, self.proj = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.up, self.down = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.heads, -1).transpose(1, 2) for t in self.qkv(self.ln1(x)).split(C, dim=2))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C))
        return x + self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, layers, heads, channels, vocab, positions):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, channels), nn.Embedding(positions, channels)
        self.blocks = nn.ModuleList(Block(channels, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(channels)
        for p in self.parameters():
            nn.init.normal_(p, std=0.02) if p.dim() > 1 else None

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.ln_f(x) @ self.wte.weight.T
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def main():
    parser = argparse.ArgumentParser()
    for name, default in (("layers", 12), ("heads", 12), ("channels", 768), ("vocab", 50257), ("batch", 4),
                          ("seq-len", 256), ("threads", 2), ("steps", 5), ("warmup", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--precision", choices=("fp32", "autocast", "bf16"), default="fp32",
                        help="autocast: fp32 weights, bf16 products; bf16: weights and everything else in bf16")
    parser.add_argument("--compile", action="store_true")
    o = parser.parse_args()
    torch.set_num_threads(o.threads)
    torch.manual_seed(1)
    model = GPT2(o.layers, o.heads, o.channels, o.vocab, max(o.seq_len, 1024))
    if o.precision == "bf16":
        model = model.bfloat16()
    groups = [{"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
              {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=True)
    loss_of = torch.compile(model) if o.compile else model
    precision = (torch.autocast("cpu", torch.bfloat16) if o.precision == "autocast" else contextlib.nullcontext())
    milliseconds = []
    for step in range(o.warmup + o.steps):
        tokens = torch.randint(o.vocab, (o.batch, o.seq_len + 1))
        begin = time.perf_counter()
        with precision:
            loss = loss_of(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        if step >= o.warmup:
            milliseconds.append((time.perf_counter() - begin) * 1e3)
    print(json.dumps({"ms": milliseconds, "torch": torch.__version__}))


if __name__ == "__main__":
    main()
