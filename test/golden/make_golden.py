#!/usr/bin/env python3
"""Makes the golden files of the tests with PyTorch and transformers, the oracles:

    python3 -m pip install torch transformers safetensors
    python3 test/golden/make_golden.py

ops.safetensors   inputs, outputs and gradients of every op ("OP.NAME"), fp32
ops_bf16.safetensors   the same in bf16: "OP.NAME" inputs rounded to bf16, and their results in double arithmetic;
                  "torch.OP.NAME" PyTorch's results in bf16
gpt2_tiny/        a tiny GPT-2 with awkward sizes as saved by transformers (config.json, model.safetensors), tokens
                  (train.bin, a token shard), and 20 steps of PyTorch's AdamW on it in fp32: trajectory.json (loss,
                  gradient norm, learning rate by step) and final.safetensors; logits.safetensors: the initial model's
                  for the token after the first 20; trajectory_bf16.json and final_bf16_*.safetensors: the same steps
                  with bf16 weights and activations, fp32 master weights and accumulated gradients, in micro-batches of
                  4 and of 8; masters_bf16_*.safetensors: the master weights before rounding to final_bf16_*.safetensors;
                  trajectory_optimizers.json: the same steps in fp32 by PyTorch's SGD with momentum and by Lion, and in fp64 by
                  its Muon

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


def op_cases():
    """(op, its float inputs, function of these, other inputs) of every op with a gradient."""
    tokens = torch.tensor([3, 0, 10, 3, 3, 7, 1], dtype=torch.int32)
    positions = torch.tensor([0, 1, 2, 3, 0, 1, 2], dtype=torch.int32)
    yield ("embedding", {"wte": random(11, 36), "wpe": random(5, 36)},
           lambda wte, wpe: wte[tokens.long()] + wpe[positions.long()], {"tokens": tokens, "positions": positions})
    yield ("layernorm", {"x": random(7, 36), "weight": random(36), "bias": random(36)},
           lambda x, weight, bias: F.layer_norm(x, (36,), weight, bias, 1e-5), {})
    yield "linear", {"x": random(7, 36), "weight": random(50, 36), "bias": random(50)}, F.linear, {}
    yield "gelu", {"x": random(7, 36, scale=3)}, lambda x: F.gelu(x, approximate="tanh"), {}
    for name, heads, kv_heads in (("attention", 3, 3), ("grouped_attention", 4, 2)):
        B, T, D = 2, 37, 12

        def attention(qkv, heads=heads, kv_heads=kv_heads):
            q, k, v = qkv.view(B, T, -1, D).transpose(1, 2).split([heads, kv_heads, kv_heads], dim=1)
            k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return out.transpose(1, 2).reshape(B * T, heads * D)
        yield name, {"qkv": random(B * T, (heads + 2 * kv_heads) * D)}, attention, {}
    yield "residual", {"a": random(7, 36), "b": random(7, 36)}, torch.add, {}
    # A norm in a residual branch: its dx is added to the gradient that is already there.
    yield ("residual_layernorm", {"x": random(7, 36), "weight": random(36), "bias": random(36)},
           lambda x, weight, bias: x + F.layer_norm(x, (36,), weight, bias, 1e-5), {})
    yield from llama_op_cases()


def llama_op_cases():
    """The ops that GPT-2 does not have."""
    def rmsnorm(x, weight):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight

    yield "rmsnorm", {"x": random(7, 36), "weight": random(36)}, rmsnorm, {}
    yield ("residual_rmsnorm", {"x": random(7, 36), "weight": random(36)},
           lambda x, weight: x + rmsnorm(x, weight), {})
    yield ("swiglu", {"gate_up": random(7, 36, scale=3)},
           lambda gate_up: F.silu(gate_up[:, :18]) * gate_up[:, 18:], {})

    heads, kv_heads, D = 4, 2, 12
    positions = torch.tensor([0, 1, 2, 3, 4, 0, 1, 19, 5, 2], dtype=torch.int32)

    def rotary(qkv):
        frequencies = 500.0 ** (-torch.arange(0, D, 2).float() / D)
        angle = torch.cat(2 * [positions[:, None].float() * frequencies], dim=1)[:, None]
        x, values = qkv.view(len(positions), -1, D).split([heads + kv_heads, kv_heads], dim=1)
        turned = torch.cat([-x[..., D // 2:], x[..., :D // 2]], dim=-1)
        # In double the fp32 angle counts as exact, as in the trainer.
        wide = angle.double() if qkv.dtype == torch.float64 else angle
        x = x * wide.cos().to(qkv.dtype) + turned * wide.sin().to(qkv.dtype)
        return torch.cat([x, values], dim=1).reshape(qkv.shape)
    yield "rotary", {"qkv": random(10, (heads + 2 * kv_heads) * D)}, rotary, {"positions": positions}

    def qk_norm(qkv, q_weight, k_weight):
        q, k, v = qkv.view(7, -1, D).split([heads, kv_heads, kv_heads], dim=1)
        return torch.cat([rmsnorm(q, q_weight), rmsnorm(k, k_weight), v], dim=1).reshape(qkv.shape)
    yield ("qk_norm", {"qkv": random(7, (heads + 2 * kv_heads) * D), "q_weight": random(D), "k_weight": random(D)},
           qk_norm, {})

    # Documents of 40, 1, 30 and 2 tokens packed into a sequence, one of 73 in the other.
    B, T, D = 2, 73, 8
    places = torch.cat([torch.arange(n) for n in (40, 1, 30, 2, 73)]).to(torch.int32)

    def document_attention(qkv):
        q, k, v = qkv.view(B, T, -1, D).transpose(1, 2).split([2, 1, 1], dim=1)
        k, v = (t.repeat_interleave(2, dim=1) for t in (k, v))
        rows = torch.arange(T)
        first = rows - places.view(B, 1, T).transpose(1, 2)[:, :, 0].long()
        mask = (rows[None, None] <= rows[None, :, None]) & (rows[None, None] >= first[:, :, None])
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
        return out.transpose(1, 2).reshape(B * T, 2 * D)
    yield "document_attention", {"qkv": random(B * T, 4 * D)}, document_attention, {"positions": places}


def make_ops():
    """Upstream gradients are random, "d" names a gradient."""
    torch.manual_seed(1)
    golden, golden_bf16 = {}, {}

    def record(into, op, tensors):
        for name, tensor in tensors.items():
            into[f"{op}.{name}"] = tensor.detach().clone().contiguous()

    def results(inputs, dout, function, dtype):
        """Output and gradients of function at these inputs, computed in dtype."""
        leaves = {k: v.detach().to(dtype).requires_grad_() for k, v in inputs.items()}
        out = function(*leaves.values())
        out.backward(dout.to(dtype))
        return {"out": out, **{"d" + k: v.grad for k, v in leaves.items()}}

    for op, inputs, function, others in op_cases():
        dout = torch.randn_like(function(*inputs.values()))
        record(golden, op, {**inputs, **others, "dout": dout, **results(inputs, dout, function, torch.float32)})
        rounded, dout = {k: v.detach().bfloat16() for k, v in inputs.items()}, dout.bfloat16()
        exact = {k: v.float() for k, v in results(rounded, dout, function, torch.float64).items()}
        record(golden_bf16, op, {**rounded, **others, "dout": dout, **exact})
        record(golden_bf16, "torch." + op, results(rounded, dout, function, torch.bfloat16))

    targets = torch.tensor([0, 30, 5, 5, 17, 2, 9], dtype=torch.int32)

    def cross_entropy(logits, dtype, sum_in):
        leaf = logits.detach().to(dtype).requires_grad_()
        losses = F.cross_entropy(leaf.to(sum_in), targets.long(), reduction="none")
        losses.mean().backward()
        return {"losses": losses.float(), "dlogits": leaf.grad}

    logits = random(7, 31, scale=2)
    inputs = {"logits": logits, "targets": targets}
    record(golden, "cross_entropy", {**inputs, **cross_entropy(logits, torch.float32, torch.float32)})
    rounded = logits.detach().bfloat16()
    exact = {k: v.float() for k, v in cross_entropy(rounded, torch.float64, torch.float64).items()}
    record(golden_bf16, "cross_entropy", {"logits": rounded, "targets": targets, **exact})
    record(golden_bf16, "torch.cross_entropy", cross_entropy(rounded, torch.bfloat16, torch.float32))

    # clipped_adamw: the first gradient is too small to be clipped, the others are clipped by different factors, which
    # AdamW notices, though it is invariant to a constant factor. The gradient covers two parameters, with one norm.
    for op, max_norm, scales in (("adamw", math.inf, (1, 1, 1)), ("clipped_adamw", 1.0, (0.03, 1, 8))):
        p, q = random(100), random(33)
        record(golden, op, {"before": torch.cat([p, q])})
        optimizer = torch.optim.AdamW([p, q], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        for step, scale in enumerate(scales, start=1):
            p.grad, q.grad = scale * torch.randn_like(p), scale * torch.randn_like(q)
            record(golden, op, {f"gradient{step}": torch.cat([p.grad, q.grad])})
            norm = torch.nn.utils.clip_grad_norm_([p, q], max_norm)
            record(golden, op, {f"norm{step}": norm.reshape(1)})
            optimizer.step()
            record(golden, op, {f"after{step}": torch.cat([p, q])})

    gradient = torch.randn(133).bfloat16()
    record(golden_bf16, "gradient_norm", {"gradient": gradient, "norm": gradient.double().norm().float().reshape(1)})
    record(golden_bf16, "torch.gradient_norm", {"norm": gradient.norm().reshape(1)})
    save_file(golden, os.path.join(HERE, "ops.safetensors"))
    save_file(golden_bf16, os.path.join(HERE, "ops_bf16.safetensors"))


def learning_rate(step, peak=1e-3, warmup=5, max_steps=20, final_frac=0.1):
    """The learning rate of update `step`, counted from 1, as defined in llmc/train/lr_schedule.h."""
    if step <= warmup:
        return peak * step / warmup
    done = (step - warmup) / (max_steps - warmup)
    lowest = peak * final_frac
    return lowest + 0.5 * (1 + math.cos(math.pi * done)) * (peak - lowest)


def noisy_sequence(vocab, n):
    """Learnable tokens with noise: each follows from the previous one."""
    tokens = [7]
    noise = torch.rand(n)
    for i in range(1, n):
        tokens.append((tokens[-1] * 5 + 3) % vocab if noise[i] < 0.8 else int(noise[i] * 1e6) % vocab)
    return tokens


def write_shard(path, tokens):
    with open(path, "wb") as f:
        f.write(struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253))
        f.write(struct.pack(f"<{len(tokens)}H", *tokens))


def groups(parameters):
    """Matrices decay, vectors do not."""
    decayed = [p for p in parameters if p.dim() >= 2]
    others = [p for p in parameters if p.dim() < 2]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def adamw(parameters):
    return torch.optim.AdamW(groups(parameters), lr=1e-3, betas=(0.9, 0.95), eps=1e-8)


def sgd(parameters):
    return torch.optim.SGD(groups(parameters), lr=1e-3, momentum=0.9)


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, algorithm 2; PyTorch has none."""

    def __init__(self, parameters):
        super().__init__(groups(parameters), {"lr": 1e-3, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * torch.sign(beta1 * momentum + (1 - beta1) * p.grad))
                momentum.mul_(beta2).add_((1 - beta2) * p.grad)


def orthogonalised(grad, ns_coefficients, ns_steps, eps):
    """What torch.optim.Muon computes in bf16, in the dtype of the gradient."""
    a, b, c = ns_coefficients
    x = grad.T if grad.size(0) > grad.size(1) else grad
    x = x / x.norm().clamp(min=eps)
    for _ in range(ns_steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if grad.size(0) > grad.size(1) else x


class Muon:
    """torch.optim.Muon, with products that are not rounded, for each matrix of a block: q, k and v apart; and AdamW
    for all other parameters."""

    def __init__(self, model):
        torch.optim._muon._zeropower_via_newtonschulz = orthogonalised
        self.parts = []  # a weight, its part, and that part as a matrix (out, in)
        others = []
        for name, p in model.named_parameters():
            if ".h." not in name or p.dim() != 2:
                others.append(p)
                continue
            width = p.size(1) // 3 if "c_attn" in name else p.size(1)
            for first in range(0, p.size(1), width):  # transformers stores them as (in, out)
                part = slice(first, first + width)
                self.parts.append((p, part, torch.nn.Parameter(p.detach()[:, part].T.clone())))
        self.muon = torch.optim.Muon([m for _, _, m in self.parts], weight_decay=0.1, momentum=0.95, nesterov=True,
                                     adjust_lr_fn="match_rms_adamw")
        self.adamw = adamw(others)
        self.param_groups = self.muon.param_groups + self.adamw.param_groups

    def zero_grad(self):
        for p, _, _ in self.parts:
            p.grad = None
        self.adamw.zero_grad()

    def step(self):
        for p, part, matrix in self.parts:
            matrix.grad = p.grad[:, part].T.clone()
        self.muon.step()
        self.adamw.step()
        with torch.no_grad():
            for p, part, matrix in self.parts:
                p[:, part] = matrix.T


def mean_loss(model, data, samples, T):
    """The mean loss over every target token of these samples of the shard."""
    rows = torch.stack([data[k * T:k * T + T + 1] for k in samples])
    logits = model(rows[:, :-1]).logits
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), rows[:, 1:].reshape(-1))


def train(model, data, T, batch, steps, optimizer=adamw, peak=1e-3):
    """The trajectory of `steps` updates: loss, gradient norm and learning rate of each."""
    optimizer = optimizer(list(model.parameters()))
    trajectory = {"loss": [], "grad_norm": [], "lr": []}
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, peak)
        loss = mean_loss(model, data, range((step - 1) * batch, step * batch), T)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        for key, value in (("loss", loss.item()), ("grad_norm", norm.item()), ("lr", learning_rate(step, peak))):
            trajectory[key].append(value)
    return trajectory


def stored_weights(model):
    """A tied head is not stored."""
    tied = model.config.tie_word_embeddings
    return {k: v.detach().contiguous() for k, v in model.state_dict().items() if not (tied and k == "lm_head.weight")}


def make_trajectory():
    T, batch, steps, vocab = 33, 8, 20, 211
    folder = os.path.join(HERE, "gpt2_tiny")
    torch.manual_seed(2)
    config = GPT2Config(vocab_size=vocab, n_positions=48, n_embd=36, n_head=3, n_layer=3, n_inner=100, resid_pdrop=0.0,
                        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None)
    model = GPT2LMHeadModel(config)
    with torch.no_grad():  # transformers initialises biases and norms to 0 and 1, which could hide bugs
        for name, p in model.named_parameters():
            if p.dim() == 1:
                p += 0.1 * torch.randn_like(p)
    model.save_pretrained(folder)
    os.path.exists(os.path.join(folder, "generation_config.json")) and os.remove(os.path.join(folder, "generation_config.json"))

    tokens = noisy_sequence(vocab, T * batch * steps + 1)
    write_shard(os.path.join(folder, "train.bin"), tokens)
    data = torch.tensor(tokens)
    with torch.no_grad():
        save_file({"logits": model(data[None, :20]).logits[0, -1].contiguous()}, os.path.join(folder, "logits.safetensors"))
    with open(os.path.join(folder, "trajectory.json"), "w") as f:
        json.dump(train(model, data, T, batch, steps), f, indent=1)
    save_file(stored_weights(model), os.path.join(folder, "final.safetensors"))


def make_trajectories_of_optimizers():
    """The steps of make_trajectory() by other optimizers."""
    T, batch, steps, vocab = 33, 8, 20, 211
    folder = os.path.join(HERE, "gpt2_tiny")
    with open(os.path.join(folder, "train.bin"), "rb") as f:
        data = torch.tensor(struct.unpack(f"<{T * batch * steps + 1}H", f.read()[1024:]))
    trajectories = {}
    for name, optimizer, peak in (("sgd", sgd, 0.3), ("lion", Lion, 3e-4)):
        model = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32)
        trajectories[name] = {"peak": peak, **train(model, data, T, batch, steps, optimizer, peak)}
    model = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float64)
    trajectories["muon"] = {"peak": 3e-3, **train(model, data, T, batch, steps, lambda _: Muon(model), 3e-3)}
    with open(os.path.join(folder, "trajectory_optimizers.json"), "w") as f:
        json.dump(trajectories, f, indent=1)


def make_trajectory_bf16():
    """The steps of make_trajectory() in mixed precision, with two sizes of micro-batches."""
    T, batch, steps, vocab = 33, 8, 20, 211
    folder = os.path.join(HERE, "gpt2_tiny")
    with open(os.path.join(folder, "train.bin"), "rb") as f:
        tokens = struct.unpack(f"<{T * batch * steps + 1}H", f.read()[1024:])
    data = torch.tensor(tokens)
    trajectory = {}
    for micro in (4, 8):
        masters = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32)
        model = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.bfloat16)
        pairs = list(zip(masters.parameters(), model.parameters()))
        optimizer = adamw([p for p, _ in pairs])
        lines = {"loss": [], "grad_norm": []}
        for step in range(1, steps + 1):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step)
            for master, _ in pairs:
                master.grad = torch.zeros_like(master)
            total = 0.0
            for first in range((step - 1) * batch, step * batch, micro):
                rows = torch.stack([data[k * T:k * T + T + 1] for k in range(first, first + micro)])
                logits = model(rows[:, :-1]).logits.float()
                loss = F.cross_entropy(logits.reshape(-1, vocab), rows[:, 1:].reshape(-1)) * micro / batch
                model.zero_grad()
                loss.backward()
                total += loss.item()
                for master, weight in pairs:
                    master.grad += weight.grad.float()
            norm = torch.nn.utils.clip_grad_norm_(masters.parameters(), 1.0)
            optimizer.step()
            with torch.no_grad():
                for master, weight in pairs:
                    weight.copy_(master)
            lines["loss"].append(total)
            lines["grad_norm"].append(norm.item())
        trajectory[f"micro-batches of {micro}"] = lines
        for name, of in (("final", model), ("masters", masters)):
            save_file(stored_weights(of), os.path.join(folder, f"{name}_bf16_{micro}.safetensors"))
    with open(os.path.join(folder, "trajectory_bf16.json"), "w") as f:
        json.dump(trajectory, f, indent=1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    make_ops()
    make_trajectory()
    make_trajectory_bf16()
    make_trajectories_of_optimizers()
