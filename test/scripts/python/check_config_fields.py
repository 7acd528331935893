#!/usr/bin/env python3
"""Sets fields of config.json, drawn from transformers' own classes, to unusual values, one at a time, and demands that
the trainer either refuses the field by name or computes the same loss as transformers from the same weights.

    python3 test/scripts/python/check_config_fields.py [--seed 1] [--count 300] [--family gpt2] [--train-gpt ./train_gpt]

--count 0 tries all that it knows. What transformers cannot load is not counted.
Exit status: 0 all agree, 1 with the differences. Needs torch and transformers.
"""
import argparse
import dataclasses
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import warnings

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers import GPT2Config, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config
from transformers.utils import logging

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), *[".."] * 3))
sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(ROOT, "test", "golden"))
from make_golden import write_shard   # noqa: E402

T, ROWS, VOCAB = 16, 4, 61
CLASSES = {"gpt2": GPT2Config, "llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
LLAMA = dict(vocab_size=VOCAB, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2, tie_word_embeddings=False)
BASES = {"gpt2": dict(vocab_size=VOCAB, n_embd=24, n_head=4, n_layer=2, n_positions=64, initializer_range=0.2),
         "llama": LLAMA, "qwen2": LLAMA, "qwen3": {**LLAMA, "head_dim": 8}}
SCALING = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
               original_max_position_embeddings=16)
# Values for fields whose default says too little.
VALUES = {
    "activation_function": ["relu", "gelu", "gelu_pytorch_tanh", "silu", "gelu_new"],
    "hidden_act": ["relu", "gelu", "gelu_new", "silu", "swish"],
    "is_causal": [False, True, None, 0],
    "layer_types": [["full_attention"] * 2, ["full_attention", "sliding_attention"], ["sliding_attention"] * 2,
                    ["chunked_attention"] * 2],
    "sliding_window": [3, 64, 4096, None, 0],
    "max_window_layers": [0, 1, 2],
    "attention_chunk_size": [4],
    "per_layer_config": [{"1": {"num_attention_heads": 2}}, {"0": {"rms_norm_eps": 0.1}}, {}],
    "rope_scaling": [None, SCALING, {"type": "linear", "factor": 2.0}, {"rope_type": "dynamic", "factor": 2.0},
                     {"rope_type": "yarn", "factor": 4.0}, {"rope_type": "default"},
                     {"full_attention": {"rope_type": "default", "rope_theta": 50.0}}],
    "rope_parameters": [None, {"rope_type": "default", "rope_theta": 123.0}, {**SCALING, "rope_theta": 500.0},
                        {"rope_theta": 77.0}, {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4},
                        {"rope_type": "default", "partial_rotary_factor": 0.5}],
    "rope_theta": [50.0, 10000, 1e6],
    "partial_rotary_factor": [0.5, 1.0],
    "original_max_position_embeddings": [8, 64],
    "n_inner": [None, 40, 96],
    "num_key_value_heads": [1, 2, 4, None],
    "num_attention_heads": [1, 2, 3, 4, 12], "n_head": [1, 2, 3, 4, 12], "head_dim": [6, 8, 12, None],
    "hidden_size": [12, 24, 48], "n_embd": [12, 24, 48], "num_hidden_layers": [1, 2, 3], "n_layer": [1, 2, 3],
    "max_position_embeddings": [32, 64, 128], "n_positions": [32, 64, 128], "n_ctx": [16, 64],
    "vocab_size": [60, VOCAB, 62], "intermediate_size": [24, 40],
    "quantization_config": [None, {"quant_method": "bitsandbytes", "load_in_4bit": True}],
    "dtype": ["float32", "bfloat16"], "torch_dtype": ["float32", "float16"],
    "attn_implementation": ["eager", "sdpa"], "_attn_implementation": ["eager"],
    "pretraining_tp": [1, 2], "chunk_size_feed_forward": [0, 4],
    "id2label": [{"0": "a", "1": "b"}], "label2id": [{"a": 0, "b": 1}], "problem_type": ["regression"],
    "architectures": [["GPT2LMHeadModel"], ["LlamaModel"], ["X"]],
    "transformers_weights": ["other.safetensors"], "name_or_path": ["x"], "_name_or_path": ["x"],
    "eos_token_id": [3, [3, 4], None], "bos_token_id": [3, None], "pad_token_id": [3, None, VOCAB - 1],
    "layer_norm_epsilon": [0.1, 1e-5, 0.0], "rms_norm_eps": [0.1, 1e-6, 1e-5], "layer_norm_eps": [0.5],
    "attention_multiplier": [2.0], "residual_multiplier": [0.5], "embedding_multiplier": [2.0], "logits_scaling": [2.0],
    "attn_logit_softcapping": [5.0], "final_logit_softcapping": [5.0], "logit_scale": [0.5], "scale_embedding": [True],
    "use_qk_norm": [True, False], "qk_layernorm": [True], "no_rope_layers": [[0, 1]], "use_bidirectional_attention": [True],
    "rope_interleaved": [True, False], "is_llama_config": [True], "auto_map": [{"AutoModel": "x.Y"}],
    "gradient_checkpointing": [True, False], "use_mrope": [True, False], "model_type": ["mistral", "gpt_neo"],
    "fusion_config": [{"x": True}, None], "distributed_config": [None], "attribute_map": [{"n_layer": "n_head"}],
    "transformers_version": ["4.0.0", "9.9.9"], "default_theta": [50.0], "base_config_key": ["x"],
}


def fields_of(family):
    """Names of every field that transformers' classes declare, of this family and of the others, and of what its code
    reads beside them."""
    names = {f.name for cls in (*CLASSES.values(), PreTrainedConfig) for f in dataclasses.fields(cls)}
    names |= set(CLASSES["gpt2"].attribute_map) | set(VALUES)
    names |= set(GenerationConfig._get_default_generation_params())
    return sorted(names)


def values_of(family, field):
    if field in VALUES:
        return VALUES[field]
    default = getattr(CLASSES[family](), field, None)
    if default is None:
        default = GenerationConfig._get_default_generation_params().get(field)
    if isinstance(default, bool):
        return [not default, default, None]
    if isinstance(default, int):
        return [default + 1, 0]
    if isinstance(default, float):
        return [default + 0.25, 0.0]
    return ["x", True]


def pairs_of(family):
    """The base with one field changed; for GPT-2 also with the other families' names of its fields, alone and in
    contradiction."""
    for field in fields_of(family):
        for value in values_of(family, field):
            yield f"{field} = {json.dumps(value)}", field, {**BASES[family], field: value}
    for other, name in CLASSES[family].attribute_map.items():
        alone = {k: v for k, v in BASES[family].items() if k != name}
        yield f"{other} instead of {name}", other, {**alone, other: BASES[family][name]}
        yield f"{other} beside a wrong {name}", other, {**BASES[family], name: 7, other: BASES[family][name]}
        yield f"a wrong {other} beside {name}", other, {**BASES[family], other: 3 * BASES[family][name]}


def write_config(folder, family, config):
    with open(f"{folder}/config.json", "w") as f:
        json.dump({"model_type": family, **config}, f)


def their_loss(folder, data):
    """None: transformers does not load it, or not with all its weights."""
    try:
        model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        if any(info[kind] for kind in ("missing_keys", "mismatched_keys", "error_msgs") if kind in info):
            return None
        with torch.no_grad():
            logits = model.eval()(data[:, :-1]).logits.double()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), data[:, 1:].flatten()).item()
    except (Exception, RecursionError, MemoryError):   # whatever its reason
        return None


def our_loss(trainer, folder, out):
    """The loss over all of the data, in one step, or the error."""
    result = subprocess.run([trainer, "--model", folder, "--train-data", f"{folder}/train.bin", "--seq-len", str(T),
                             "--batch-size", str(ROWS), "--max-steps", "1", "--out-dir", out, "--threads", "1",
                             "--tokenizer", "bytes", "--device", "cpu"],
                            capture_output=True, text=True)
    if result.returncode != 0:
        return None, f"exit status {result.returncode}: {result.stderr.strip()}"
    with open(f"{out}/metrics.jsonl") as f:
        return json.loads(f.readline())["loss"], ""


def check(family, pairs, trainer):
    agree = refused = 0
    failures = []
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **BASES[family]), dtype=torch.float32)
        with torch.no_grad():   # norms and biases that are not 1 and 0, attention that depends on what it reads
            for name, p in model.named_parameters():
                p += 0.2 * torch.randn_like(p)
        model.save_pretrained(folder)
        os.remove(f"{folder}/generation_config.json")
        data = torch.randint(VOCAB, (ROWS * T + 1,))
        write_shard(f"{folder}/train.bin", data.tolist())
        rows = torch.stack([data[k * T:k * T + T + 1] for k in range(ROWS)])
        unusual = 0
        write_config(folder, family, BASES[family])
        base = their_loss(folder, rows)
        for what, field, config in [("nothing changed", "", BASES[family]), *pairs]:
            write_config(folder, family, config)
            theirs = their_loss(folder, rows)
            if theirs is None:
                continue
            with tempfile.TemporaryDirectory() as out:
                ours, error = our_loss(trainer, folder, out)
            unusual += abs(theirs - base) > 1e-5
            if ours is None:
                names = [field, *config[field], "rope_type"] if isinstance(config.get(field), dict) else [field]
                named = any(f'"{name}"' in error for name in names) or any(
                    words in error for words in ("config.json describes", "config.json and the options"))   # a tensor
                refused += 1
                if field and named and "exit status 1:" in error:
                    continue
                failures.append(f"{what}: {error}")
            elif abs(ours - theirs) <= 2e-5 * abs(theirs):
                agree += 1
            else:
                failures.append(f"{what}: loss {ours}, of transformers {theirs}")
    print(f"{family}: {agree} fields compute what transformers does, {refused} are refused, {unusual} change the loss; "
          f"{len(failures)} failures", flush=True)
    for failure in failures:
        print(f"  {failure}", file=sys.stderr, flush=True)
    return agree + refused, failures


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=300, help="fields with a value, of all families together; 0: all")
    parser.add_argument("--family", choices=CLASSES, action="append", help="may be repeated; default: all")
    parser.add_argument("--train-gpt", default=os.path.join(ROOT, "train_gpt"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_DATA, (6 << 30, 6 << 30))   # some fields make transformers take all there is
    logging.disable_progress_bar()
    logging.set_verbosity(logging.CRITICAL)
    warnings.simplefilter("ignore")
    families = options.family or list(CLASSES)
    everything = [(family, pair) for family in families for pair in pairs_of(family)]
    chosen = everything
    if 0 < options.count < len(everything):
        chosen = random.Random(options.seed).sample(everything, options.count)
    total, failed = 0, 0
    for family in families:
        compared, failures = check(family, [pair for f, pair in chosen if f == family], options.train_gpt)
        total, failed = total + compared, failed + len(failures)
    print(f"{total} compared, {failed} differ", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
