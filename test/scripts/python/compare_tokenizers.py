"""For long_tokenize_test.sh: trains tokenizers of the models' forms on texts, and compares ./train_gpt --tokenize with
Hugging Face's library, tokens and speed.

    compare_tokenizers.py TEXTS.jsonl FOLDER SEED [MB]      MB: how much of the texts to compare (default: all)
"""

import json
import os
import random
import struct
import subprocess
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "../../golden"))
import make_tokenizers as forms   # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers, trainers   # noqa: E402

END = "<|endoftext|>"


def train(form, texts):
    """A tokenizer.json as a value: `form` is a golden file, of which all but the model stays."""
    with open(os.path.join(forms.HERE, form), encoding="utf-8") as file:
        made = json.load(file)
    tokenizer = Tokenizer(models.BPE())
    if made["model"].get("byte_fallback"):
        first = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.BpeTrainer(vocab_size=32000, special_tokens=first, limit_alphabet=6000, show_progress=False)
    else:
        tokenizer = Tokenizer.from_str(json.dumps({**made, "added_tokens": [], "post_processor": None}))
        trainer = trainers.BpeTrainer(vocab_size={"gpt2.json": 50256, "smollm2.json": 49152}.get(form, 100000), show_progress=False,
                                      initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    made["model"].update(vocab=model["vocab"], merges=model["merges"])
    if not made["model"].get("byte_fallback"):
        made["added_tokens"] = [{**forms_token(END), "id": len(model["vocab"])}]
        made["post_processor"] = None
    return made


def forms_token(content):
    return {"content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def byte_strings(seed, count):
    """Random bytes, as far as they are UTF-8: lone bytes stand for themselves in Latin-1."""
    rng = random.Random(seed)
    for _ in range(count):
        data = bytes(rng.choices(range(256), k=rng.randint(1, 60)))
        yield data.decode(errors="replace") if rng.random() < 0.5 else data.decode("latin-1")


def main():
    texts_path, folder, seed = sys.argv[1:4]
    most = float(sys.argv[4]) * 1e6 if len(sys.argv) > 4 else float("inf")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    texts, size = [], 0
    with open(texts_path, encoding="utf-8") as file:
        for line in file:
            texts.append(json.loads(line)["text"])
            size += len(texts[-1].encode())
            if size >= most:
                break
    rng = random.Random(seed)
    sample = [text[:20000] for text in rng.sample(texts, min(len(texts), 1500))]
    texts += byte_strings(seed, 100_000 if most == float("inf") else 10_000)
    with open(f"{folder}/all.jsonl", "w", encoding="utf-8") as file:
        for text in texts:
            file.write(json.dumps({"text": text}) + "\n")
    size = sum(len(text.encode()) for text in texts)
    for form in ("gpt2.json", "llama3.json", "qwen2.5.json", "smollm2.json", "llama2.json"):
        path, prefix = f"{folder}/{form}", f"{folder}/{form}.shards"
        with open(path, "w", encoding="utf-8") as file:
            json.dump(train(form, sample), file)
        began, ran = time.monotonic(), os.times()
        subprocess.run(["./train_gpt", "--tokenize", f"{folder}/all.jsonl", "--tokenizer", path, "--out", prefix, "--threads",
                        "1", "--restart", "--shard-size", str(10**9)], check=True, stdout=subprocess.DEVNULL)
        ours, cpu = time.monotonic() - began, os.times()
        ours_cpu = cpu.children_user + cpu.children_system - ran.children_user - ran.children_system
        tokenizer = Tokenizer.from_file(path)
        tokenizer.encode_special_tokens = True
        end = tokenizer.token_to_id(END) if form != "llama2.json" else tokenizer.token_to_id("</s>")
        with open(f"{prefix}_train_000000.bin", "rb") as file:
            header = struct.unpack("<3i", file.read(1024)[:12])
            data = file.read()
        tokens = memoryview(data).cast("H" if header[1] == 1 else "I")
        at, theirs_cpu = 0, 0.0
        for number, text in enumerate(texts):
            began = time.process_time()
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            theirs_cpu += time.process_time() - began
            if list(tokens[at:at + 1 + len(ids)]) != [end] + ids:
                sys.exit(f"{form}: document {number + 1} of {folder}/all.jsonl has other tokens: {text[:80]!r}")
            at += 1 + len(ids)
        if at != len(tokens):
            sys.exit(f"{form}: {len(tokens) - at} tokens follow the last document's")
        print(f"{form:14} {size / 1e6:.1f} MB, {at:,} tokens equal; one thread: {size / 1e6 / ours_cpu:.1f} MB/s of processor "
              f"time ({size / 1e6 / ours:.1f} of wall-clock), the library {size / 1e6 / theirs_cpu:.2f}, "
              f"{theirs_cpu / ours_cpu:.1f} times", flush=True)


if __name__ == "__main__":
    main()
