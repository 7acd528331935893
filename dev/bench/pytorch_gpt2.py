#!/usr/bin/env python3
"""The training step of train_gpt's GPT-2 models in PyTorch, for comparison: the same sizes, the same batch.

    python3 dev/bench/pytorch_gpt2.py --n-layer 4 --n-head 4 --n-embd 128 --vocab-size 257 -b 16 -t 128
    python3 dev/bench/pytorch_gpt2.py --dtype bf16 --weights fp32 --compile -b 4 -t 256 --steps 5

One JSON object a line on stdout: {"kind":"ready",..} after the warm-up, {"kind":"step","loss":..,"ms":..,
"tokens_per_s":..} for each step, {"kind":"turn",..} with the median of the steps. With --serve it stays, idle, and takes
commands on stdin, one a line: `steps N` or `profile N`; so two programs can take turns without starting anew.

The model is written as PyTorch's users write it (after Karpathy's nanoGPT): a tied table, no dropout, fused causal
attention, AdamW's fused kernel, gradients as None between steps.
"""

import argparse
import array
import json
import math
import statistics
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, n_head, C):
        super().__init__()
        self.n_head = n_head
        self.ln1, self.ln2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.qkv, self.proj = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.up, self.down = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def attention(self, x):   # (B, T, C)
        B, T, C = x.shape
        q, k, v = (y.view(B, T, self.n_head, -1).transpose(1, 2) for y in self.qkv(x).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)   # (B, H, T, D)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))

    def forward(self, x):
        x = x + self.attention(self.ln1(x))
        return x + self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, n_layer, n_head, C, V, n_positions):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(V, C), nn.Embedding(n_positions, C)
        self.blocks = nn.ModuleList(Block(n_head, C) for _ in range(n_layer))
        self.ln_f = nn.LayerNorm(C)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                residual = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * n_layer) if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, tokens, targets):   # (B, T) (B, T) -> mean loss
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)   # the head's matrix is the token embedding's
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def read_batch(path, B, T, vocab_size):
    """The first B (T + 1 overlapping) samples of a token shard, as train_gpt reads them; no path: random tokens."""
    n = B * T + 1
    if path is None:
        tokens = torch.randint(vocab_size, (n,), generator=torch.Generator().manual_seed(1))
    else:
        with open(path, "rb") as file:
            file.seek(1024)   # the header
            values = array.array("H")
            values.frombytes(file.read(2 * n))
        if len(values) < n:
            sys.exit(f"pytorch_gpt2.py: {path} has {len(values)} tokens, and {B} x {T} + 1 are needed")
        tokens = torch.tensor(values.tolist())
    return tokens[:-1].view(B, T), tokens[1:].view(B, T)


def make_optimizer(model):
    """AdamW with train_gpt's defaults: decay for matrices only. Fused where this PyTorch has it for CPUs."""
    groups = [{"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
              {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]
    settings = dict(lr=3e-4, betas=(0.9, 0.95), eps=1e-8)
    try:
        return torch.optim.AdamW(groups, fused=True, **settings), "fused"
    except (RuntimeError, ValueError):
        return torch.optim.AdamW(groups, foreach=True, **settings), "foreach"


class Training:
    def __init__(self, o):
        torch.manual_seed(42)
        self.tokens, self.targets = read_batch(o.tokens, o.batch_size, o.seq_len, o.vocab_size)
        self.model = GPT2(o.n_layer, o.n_head, o.n_embd, o.vocab_size, max(o.n_positions, o.seq_len))
        if o.dtype == "bf16" and o.weights == "bf16":
            self.model.bfloat16()
        self.autocast = o.dtype == "bf16" and o.weights == "fp32"
        self.optimizer, self.optimizer_kind = make_optimizer(self.model)
        self.loss = torch.compile(self.model) if o.compile else self.model

    def step(self):
        """One update; returns the loss before it."""
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            loss = self.loss(self.tokens, self.targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()


def emit(kind, **fields):
    print(json.dumps({"kind": kind, **fields}), flush=True)


def run_steps(training, n):
    times = []
    tokens = training.tokens.numel()
    for step in range(1, n + 1):
        begin = time.perf_counter()
        loss = training.step()
        ms = (time.perf_counter() - begin) * 1e3
        times.append(ms)
        emit("step", step=step, loss=loss, ms=ms, tokens_per_s=tokens / ms * 1e3)
    ms = statistics.median(times)
    emit("turn", steps=n, ms=ms, tokens_per_s=tokens / ms * 1e3)


def run_profile(training, n):
    """Milliseconds a step by PyTorch's own names of operators, without what they call."""
    begin = time.perf_counter()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(n):
            training.step()
    seconds = time.perf_counter() - begin
    rows = sorted(profile.key_averages(), key=lambda row: -row.self_cpu_time_total)
    emit("ops", step_ms=seconds / n * 1e3,
         ops=[{"name": r.key, "ms": r.self_cpu_time_total / n / 1e3, "calls": r.count // n} for r in rows])


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    def number(name, default, meaning, short=()):
        parser.add_argument(*short, name, type=int, default=default, metavar="N", help=f"{meaning} [%(default)s]")
    number("--n-layer", 12, "layers")
    number("--n-head", 12, "attention heads")
    number("--n-embd", 768, "channels")
    number("--vocab-size", 50304, "vocabulary; 50304, which is 50257 rounded up, is faster")
    number("--n-positions", 1024, "rows of the position table")
    number("--batch-size", 4, "sequences", ["-b"])
    number("--seq-len", 256, "tokens in a sequence", ["-t"])
    number("--threads", torch.get_num_threads(), "threads")
    number("--steps", 10, "steps to measure")
    number("--warmup", 2, "steps before; compilation is in the first one")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of the computation [%(default)s]")
    parser.add_argument("--weights", choices=("fp32", "bf16"), default="fp32",
                        help="with --dtype bf16: fp32 weights under autocast, or all in bf16 [%(default)s]")
    parser.add_argument("--compile", action="store_true", help="torch.compile; without it, eager")
    parser.add_argument("--tokens", metavar="FILE", help="token shard; without it, random tokens")
    parser.add_argument("--profile", action="store_true", help="print the time by operator, too")
    parser.add_argument("--serve", action="store_true", help="take commands on stdin: steps N, profile N")
    return parser.parse_args()


def main():
    o = parse_options()
    torch.set_num_threads(o.threads)
    begin = time.perf_counter()
    training = Training(o)
    losses = [training.step() for _ in range(o.warmup)]
    emit("ready", torch=torch.__version__, optimizer=training.optimizer_kind, losses=losses,
         parameters=sum(p.numel() for p in training.model.parameters()), seconds=time.perf_counter() - begin)
    commands = {"steps": run_steps, "profile": run_profile}
    if not o.serve:
        run_steps(training, o.steps)
        if o.profile:
            run_profile(training, o.steps)
        return
    for line in sys.stdin:
        name, n = line.split()
        commands[name](training, int(n))


if __name__ == "__main__":
    main()
