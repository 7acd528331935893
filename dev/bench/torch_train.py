#!/usr/bin/env python3
"""The PyTorch baseline: the trainer's step in plain PyTorch, on a CPU or a GPU. Prints one line of JSON with the
milliseconds, loss and gradient norm of each step, and more.

    python3 dev/bench/torch_train.py --model gpt2:124M --train-data SHARD --batch-size 64 --device cuda --compile

Same model, loss, gradient clipping, AdamW with weight decay on matrices only, and data order: from the same weights it
computes the trainer's losses. Attention is F.scaled_dot_product_attention, on a GPU with its fastest kernel; AdamW is
fused. --model may be a directory with a Hugging Face config.json of GPT-2, Llama or Qwen 2, and weights, which are then
loaded. d<N>-e<E> is transformers' Mixtral (sparse_model.py), with its balancing loss.
"""
import argparse
import contextlib
import dataclasses
import json
import math
import os
import struct
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import sparse_model


@dataclasses.dataclass
class Shape:
    family: str   # gpt2; or llama: RMSNorm, rotary positions, SwiGLU, shared key-value heads
    n_layer: int
    n_head: int
    n_kv_head: int
    n_embd: int
    n_ffn: int
    vocab_size: int
    n_positions: int
    eps: float
    tied: bool = True
    theta: float = 0.0
    qkv_bias: bool = True

    def head_size(self):
        return self.n_embd // self.n_head


PRESETS = {
    "gpt2:124M": Shape("gpt2", 12, 12, 12, 768, 3072, 50257, 1024, 1e-5),
    "gpt2:350M": Shape("gpt2", 24, 16, 16, 1024, 4096, 50257, 1024, 1e-5),
    "gpt2:774M": Shape("gpt2", 36, 20, 20, 1280, 5120, 50257, 1024, 1e-5),
    "gpt2:1558M": Shape("gpt2", 48, 25, 25, 1600, 6400, 50257, 1024, 1e-5),
    "smollm2:135M": Shape("llama", 30, 9, 3, 576, 1536, 49152, 8192, 1e-5, True, 1e5, False),
    "qwen2.5:0.5B": Shape("llama", 24, 14, 2, 896, 4864, 151936, 32768, 1e-6, True, 1e6),
    "qwen2.5:1.5B": Shape("llama", 28, 12, 2, 1536, 8960, 151936, 131072, 1e-6, True, 1e6),
}

SIZES = ("n_layer", "n_head", "n_kv_head", "n_embd", "n_ffn", "vocab_size")   # which options override


def shape_of(model):
    if model in PRESETS:
        return dataclasses.replace(PRESETS[model])
    with open(f"{model}/config.json") as file:
        c = json.load(file)
    if c["model_type"] == "gpt2":
        return Shape("gpt2", c["n_layer"], c["n_head"], c["n_head"], c["n_embd"], c.get("n_inner") or 4 * c["n_embd"],
                     c["vocab_size"], c["n_positions"], c["layer_norm_epsilon"], c.get("tie_word_embeddings", True))
    rope = c.get("rope_parameters") or {}
    scaled = c.get("rope_scaling") or rope.get("rope_type", "default") != "default"
    if c["model_type"] not in ("llama", "qwen2") or scaled:
        raise SystemExit(f"torch_train.py: error: {model}/config.json is none of gpt2, qwen2 and unscaled llama")
    return Shape("llama", c["num_hidden_layers"], c["num_attention_heads"], c["num_key_value_heads"], c["hidden_size"],
                 c["intermediate_size"], c["vocab_size"], c["max_position_embeddings"], c["rms_norm_eps"],
                 c.get("tie_word_embeddings", False), rope.get("rope_theta") or c.get("rope_theta", 1e4),
                 c["model_type"] == "qwen2")


# ---- The model ------------------------------------------------------------------------------------------------------

class Block(nn.Module):
    def __init__(self, s, repeat_heads):
        super().__init__()
        C, Q, KV, gpt2 = s.n_embd, s.n_embd, s.n_kv_head * s.head_size(), s.family == "gpt2"
        self.shape, self.repeat_heads = s, repeat_heads
        self.norm1, self.norm2 = (nn.LayerNorm(C, s.eps) if gpt2 else nn.RMSNorm(C, s.eps) for _ in range(2))
        self.qkv, self.proj = nn.Linear(C, Q + 2 * KV, bias=s.qkv_bias), nn.Linear(Q, C, bias=gpt2)
        self.up, self.down = nn.Linear(C, s.n_ffn if gpt2 else 2 * s.n_ffn, bias=gpt2), nn.Linear(s.n_ffn, C, bias=gpt2)

    def attention(self, x, rotary):
        s, (B, T, C) = self.shape, x.shape
        D, groups = s.head_size(), s.n_head // s.n_kv_head
        q, k, v = (t.view(B, T, -1, D).transpose(1, 2)
                   for t in self.qkv(x).split([C, s.n_kv_head * D, s.n_kv_head * D], dim=2))
        if rotary is not None:
            q, k = turn(q, *rotary), turn(k, *rotary)
        if groups > 1 and self.repeat_heads:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] < q.shape[1])
        return out.transpose(1, 2).reshape(B, T, C)

    def forward(self, x, rotary):
        x = x + self.proj(self.attention(self.norm1(x), rotary))
        up = self.up(self.norm2(x))
        if self.shape.family == "gpt2":
            return x + self.down(F.gelu(up, approximate="tanh"))
        gate, up = up.chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def turn(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-b, a), dim=-1) * sin).to(x.dtype)


class Model(nn.Module):
    """Returns the loss, to minimise and to report. Tables are padded to a multiple of 128 rows, for speed; the loss
    ignores the padding."""

    def __init__(self, s, T, repeat_heads=False):
        super().__init__()
        padded = (s.vocab_size + 127) // 128 * 128
        self.shape = s
        self.wte = nn.Embedding(padded, s.n_embd)
        self.wpe = nn.Embedding(s.n_positions, s.n_embd) if s.family == "gpt2" else None
        self.blocks = nn.ModuleList(Block(s, repeat_heads) for _ in range(s.n_layer))
        self.norm = nn.LayerNorm(s.n_embd, s.eps) if s.family == "gpt2" else nn.RMSNorm(s.n_embd, s.eps)
        self.head = None if s.tied else nn.Linear(s.n_embd, padded, bias=False)
        for name, p in self.named_parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02 / (math.sqrt(2 * s.n_layer) if "proj" in name or "down" in name else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(p)
        D = s.head_size()
        angles = torch.outer(torch.arange(T).float(), s.theta ** (-torch.arange(0, D, 2).float() / D)).repeat(1, 2) \
            if s.family != "gpt2" else torch.zeros(0)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens, targets):
        x, rotary = self.wte(tokens), None
        if self.wpe is not None:
            x = x + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        else:
            rotary = (self.cos, self.sin)
        for block in self.blocks:
            x = block(x, rotary)
        logits = F.linear(self.norm(x), (self.head or self.wte).weight)[..., :self.shape.vocab_size]
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        return loss, loss.detach()


def count_parameters(model):
    """All parameters without padding, and those that multiply activations."""
    s = model.shape
    padding = (model.wte.num_embeddings - s.vocab_size) * s.n_embd
    count = sum(p.numel() for p in model.parameters()) - padding * (1 if s.tied else 2)
    lookups = (s.n_positions if s.family == "gpt2" else 0) + (0 if s.tied else s.vocab_size)
    return count, count - lookups * s.n_embd


# ---- Weights and data -----------------------------------------------------------------------------------------------

def read_safetensors(path):
    dtypes = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    with open(path, "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        data = bytearray(file.read())
    return {name.removeprefix("transformer.").removeprefix("model."):
            torch.frombuffer(data, dtype=dtypes[t["dtype"]], count=math.prod(t["shape"]), offset=t["data_offsets"][0])
            .view(t["shape"]).float() for name, t in header.items() if name != "__metadata__"}


def load_weights(model, path):
    tensors, s, gpt2 = read_safetensors(path), model.shape, model.shape.family == "gpt2"
    blocks = [("norm1", ["ln_1"]), ("qkv", ["attn.c_attn"]), ("proj", ["attn.c_proj"]), ("norm2", ["ln_2"]),
              ("up", ["mlp.c_fc"]), ("down", ["mlp.c_proj"])] if gpt2 else [
        ("norm1", ["input_layernorm"]), ("qkv", [f"self_attn.{n}_proj" for n in "qkv"]), ("proj", ["self_attn.o_proj"]),
        ("norm2", ["post_attention_layernorm"]), ("up", ["mlp.gate_proj", "mlp.up_proj"]), ("down", ["mlp.down_proj"])]
    sources = {"wte": ["wte" if gpt2 else "embed_tokens"], "wpe": ["wpe"], "norm": ["ln_f" if gpt2 else "norm"],
               "head": ["lm_head"]}
    for i in range(s.n_layer):
        for ours, theirs in blocks:
            sources[f"blocks.{i}.{ours}"] = [f"{'h' if gpt2 else 'layers'}.{i}.{name}" for name in theirs]
    with torch.no_grad():
        for name, p in model.named_parameters():
            module, kind = name.rsplit(".", 1)
            value = torch.cat([tensors[f"{source}.{kind}"] for source in sources[module]])
            if gpt2 and kind == "weight" and module.split(".")[-1] in ("qkv", "proj", "up", "down"):
                value = value.T   # GPT-2's matrices are stored as (in, out)
            p[:len(value)] = value


def read_shard(path):
    with open(path, "rb") as file:
        magic = struct.unpack("<256i", file.read(1024))[0]
        data = bytearray(file.read())
    if magic not in (20240520, 20240801):
        raise SystemExit(f"torch_train.py: error: {path} begins with {magic}; expected a token shard (data/README.md)")
    if magic == 20240801:
        return torch.frombuffer(data, dtype=torch.int32).long()
    return torch.frombuffer(data, dtype=torch.int16).long() & 0xffff


def batches(tokens, B, T, device):
    """Samples in file order, repeatedly: inputs and targets, copied while the GPU computes."""
    samples = (len(tokens) - 1) // T
    for first in range(0, 1 << 62, B):
        rows = torch.stack([tokens[k % samples * T:][:T + 1] for k in range(first, first + B)])
        pair = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        yield tuple(t.pin_memory().to(device, non_blocking=True) for t in pair) if device == "cuda" else pair


# ---- The step -------------------------------------------------------------------------------------------------------

KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
           "efficient": SDPBackend.EFFICIENT_ATTENTION}


def attention_ms(s, B, T, dtype, kernel, repeat_heads):
    """Forward and backward of one layer; infinite if the kernel does not support the shape."""
    q, k, v = (torch.randn(B, heads, T, s.head_size(), device="cuda", dtype=dtype, requires_grad=True)
               for heads in (s.n_head, s.n_kv_head, s.n_kv_head))
    groups = s.n_head // s.n_kv_head if repeat_heads else 1

    def once():
        wide = [t.repeat_interleave(groups, 1) for t in (k, v)]
        out = F.scaled_dot_product_attention(q, *wide, is_causal=True, enable_gqa=wide[0].shape[1] < s.n_head)
        out.backward(out)

    try:
        with sdpa_kernel(KERNELS[kernel]):
            for _ in range(3):
                once()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(10):
                once()
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) / 10
    except RuntimeError:
        return math.inf


def choose_attention(s, o):
    """The fastest kernel, whether it repeats shared heads, and all times."""
    dtype = torch.float32 if o.precision == "fp32" else torch.bfloat16
    kernels = list(KERNELS) if o.attention == "auto" else [o.attention]
    times = {(kernel, repeat): attention_ms(s, o.batch_size, o.seq_len, dtype, kernel, repeat)
             for kernel in kernels for repeat in ((False, True) if s.n_kv_head < s.n_head else (False,))}
    best = min(times, key=times.get)
    if math.isinf(times[best]):
        raise SystemExit(f"torch_train.py: error: none of the attention kernels {kernels} takes this shape")
    names = {(kernel, repeat): f"{kernel}{', heads repeated' if repeat else ''}" for kernel, repeat in times}
    return *best, {names[way]: round(ms, 4) for way, ms in times.items() if ms < math.inf}


class Optimizer:
    """Clipping and fused AdamW. With bf16 weights and fp32 masters, updates the masters and copies them back."""

    def __init__(self, model, o):
        self.weights = list(model.parameters())
        self.masters = [p.detach().clone() for p in self.weights] if o.precision == "master" else self.weights
        if o.precision in ("master", "bf16"):
            for p in self.weights:   # but not the buffers of rotary angles
                p.data = p.data.bfloat16()
        if o.precision == "bf16":
            self.masters = self.weights
        groups = [{"params": [p for p in self.masters if p.dim() > 1], "weight_decay": 0.1},
                  {"params": [p for p in self.masters if p.dim() < 2], "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW(groups, lr=o.lr, betas=(0.9, 0.95), eps=1e-8, fused=True)

    def step(self):
        if self.masters is not self.weights:
            for master, weight in zip(self.masters, self.weights):
                master.grad, weight.grad = weight.grad.float(), None
        norm = nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.adamw.step()
        self.adamw.zero_grad()
        if self.masters is not self.weights:
            with torch.no_grad():
                torch._foreach_copy_(self.weights, self.masters)
        return norm


def dense_model(o):
    """The model, its attention kernel and the times of all, and its numbers of parameters."""
    s = shape_of(o.model)
    if o.n_embd:
        s.n_ffn = s.n_ffn * o.n_embd // s.n_embd
    if o.n_head:
        s.n_kv_head = o.n_head * s.n_kv_head // s.n_head
    for name in SIZES:
        setattr(s, name, getattr(o, name) or getattr(s, name))
    kernel, repeat_heads, times = choose_attention(s, o) if o.device == "cuda" else ("cpu", False, {})
    model = Model(s, o.seq_len, repeat_heads)
    if os.path.exists(f"{o.model}/model.safetensors"):
        load_weights(model, f"{o.model}/model.safetensors")
    return model, s.n_layer * s.n_embd, kernel, times, count_parameters(model)


def forget_peak_memory():
    """What compiling took is not what training takes."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def peak_memory_gib():
    """The largest resident set since then."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 2**20


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2:124M", help=f"{', '.join(PRESETS)}, d<N>-e<E>, or a directory")
    for name in SIZES:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help="override the model's value")
    parser.add_argument("--train-data", required=True, metavar="SHARD")
    for name, default in (("batch-size", 4), ("seq-len", 256), ("threads", 2), ("steps", 5), ("warmup", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", choices=("fp32", "autocast", "master", "bf16"), default="fp32",
                        help="autocast: fp32 weights, bf16 products; master: bf16 weights with fp32 masters; bf16: "
                             "all in bf16, the optimizer too")
    parser.add_argument("--attention", choices=("auto", *KERNELS), default="auto", help="on a GPU")
    parser.add_argument("--compile", action="store_true")
    o = parser.parse_args()
    torch.set_num_threads(o.threads)
    torch.manual_seed(1)
    sparse = sparse_model.is_sparse(o.model)
    model, width, kernel, times, (count, multiplied) = sparse_model.create(o) if sparse else dense_model(o)
    model.to(o.device)
    optimizer = Optimizer(model, o)
    loss_of = torch.compile(model) if o.compile else model
    precision = torch.autocast(o.device, torch.bfloat16) if o.precision == "autocast" else contextlib.nullcontext()
    data = batches(read_shard(o.train_data), o.batch_size, o.seq_len, o.device)
    milliseconds, losses, norms = [], [], []
    with sdpa_kernel(KERNELS[kernel]) if kernel in KERNELS else contextlib.nullcontext():
        for step in range(o.warmup + o.steps):
            if step == o.warmup and o.device == "cpu":
                forget_peak_memory()
            begin = time.perf_counter()
            inputs, targets = next(data)
            with precision:
                minimised, loss = loss_of(inputs, targets)
            minimised.backward()
            norms.append(optimizer.step())
            losses.append(loss.item())
            milliseconds.append((time.perf_counter() - begin) * 1e3)
    print(json.dumps({
        "ms": milliseconds[o.warmup:], "losses": losses, "norms": [norm.item() for norm in norms], "parameters": count,
        "flops_per_token": 6 * multiplied + 6 * width * o.seq_len,
        "torch": torch.__version__, "cuda": torch.version.cuda, "kernel": kernel, "kernel_ms": times,
        "gib": torch.cuda.max_memory_allocated() / 2**30 if o.device == "cuda" else peak_memory_gib()}))


if __name__ == "__main__":
    main()
