"""The sparse models of torch_train.py: transformers' Mixtral in the shape of the trainer's d<N>-e<E>, whose experts run
by the fastest of transformers' implementations for the step's shape."""
import re
import time

import torch
import torch.nn.functional as F
from torch import nn

IMPLEMENTATIONS = ("eager", "grouped_mm")   # batched_mm copies the weights of an expert for every token: for decoding


def is_sparse(model):
    return re.fullmatch(r"d\d+-e\d+", model) is not None


def config_of(o):
    """transformers' config: see model_preset in llmc/model/presets.h."""
    from transformers import MixtralConfig
    depth, experts = map(int, re.findall(r"\d+", o.model))
    width = 4 * 64 * depth // 3 // 8 * 8
    n_embd, n_head = o.n_embd or 64 * depth, o.n_head or depth
    return MixtralConfig(
        vocab_size=o.vocab_size or 50257, hidden_size=n_embd,
        intermediate_size=o.n_ffn or width * n_embd // (64 * depth), num_hidden_layers=o.n_layer or depth,
        num_attention_heads=n_head, num_key_value_heads=o.n_kv_head or n_head,
        max_position_embeddings=o.seq_len, num_local_experts=experts, num_experts_per_tok=2, rms_norm_eps=1e-5,
        rope_theta=1e4, tie_word_embeddings=True, output_router_logits=True, router_aux_loss_coef=0.01, use_cache=False,
        bos_token_id=None, eos_token_id=None)


def choose_implementation(config, tokens, precision, device):
    """The fastest, and the milliseconds of a forward and a backward of one layer's experts with each."""
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts
    experts = MixtralExperts(config).to(device)
    for p in experts.parameters():
        nn.init.normal_(p, std=0.02)
    if precision in ("master", "bf16"):
        experts.to(torch.bfloat16)
    dtype = experts.down_proj.dtype
    x = torch.randn(tokens, config.hidden_size, device=device, dtype=dtype, requires_grad=True)
    scores, chosen = torch.rand(tokens, config.num_local_experts, device=device).softmax(1).topk(2)
    times = {}
    for implementation in IMPLEMENTATIONS:
        config._experts_implementation = implementation
        for _ in range(4):
            begin = time.perf_counter()
            with torch.autocast(device, torch.bfloat16, enabled=precision == "autocast"):
                out = experts(x, chosen, scores.to(dtype))
            out.backward(torch.ones_like(out))
            if device == "cuda":
                torch.cuda.synchronize()
            milliseconds = (time.perf_counter() - begin) * 1e3
            times[implementation] = min(times.get(implementation, milliseconds), milliseconds)
    return min(times, key=times.get), {name: round(ms, 3) for name, ms in times.items()}


class SparseModel(nn.Module):
    """Returns what is minimised, with the balancing loss, and the loss that is reported, without it."""

    def __init__(self, config, implementation):
        super().__init__()
        from transformers import MixtralForCausalLM
        config._experts_implementation = implementation
        self.lm = MixtralForCausalLM(config)
        self.lm.train()

    def forward(self, tokens, targets):
        out = self.lm(input_ids=tokens)
        loss = F.cross_entropy(out.logits.flatten(0, 1).float(), targets.flatten())
        return loss + self.lm.router_aux_loss_coef * out.aux_loss, loss.detach()


def create(o):
    """The model, the implementation of its experts and the times of all, and its numbers of parameters: all, and those
    that a token multiplies: two experts of a layer, and the table as the head."""
    try:
        c = config_of(o)
    except ImportError as error:
        raise SystemExit(f"torch_train.py: error: {o.model} is compared with transformers': {error}") from error
    implementation, times = choose_implementation(c, o.batch_size * o.seq_len, o.precision, o.device)
    model = SparseModel(c, implementation)
    count = sum(p.numel() for p in model.parameters())
    others = c.num_hidden_layers * (c.num_local_experts - 2) * 3 * c.hidden_size * c.intermediate_size
    return model, c.num_hidden_layers * c.hidden_size, implementation, times, (count, count - others)
