#!/usr/bin/env python3
"""Makes small tokenizers in the styles of published ones with Hugging Face's tokenizers, and their test cases:

    python3 -m pip install tokenizers
    python3 test/golden/make_tokenizers.py                       tokenizers/*.json; cases.json has the cases
    python3 test/golden/make_tokenizers.py --random SEED FILE    cases with the same tokenizers and random texts

The pre-tokenizers, normalizers, templates and decoders are those published with the named models. A case file lists
"texts" and, for each tokenizer, its "file", a "patch" (a JSON merge patch for it), the "ids" of each text, the
"templated" ids of the first one with the tokens that the template adds, and the text to which the ids are "decoded".

The committed files were made with tokenizers 0.23.3.
"""
import copy
import json
import os
import random
import sys
import unicodedata

import tokenizers
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from tokenizers.pre_tokenizers import ByteLevel

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tokenizers")

LLAMA3_PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
                  r"\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2_PATTERN = LLAMA3_PATTERN.replace("{1,3}", "")
GPT4O_PATTERN = "|".join([
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])
DEEPSEEK_PATTERN = (r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
                    r""" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""")
POSSESSIVE_PATTERN = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*+|"
                      r"\s*[\r\n]|\s+(?!\S)|\s+")


def split(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def byte_level(use_regex, add_prefix_space=False):
    return {"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": True, "use_regex": use_regex}


def sequence(*steps):
    return {"type": "Sequence", "pretokenizers": list(steps)}


SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
DECODER = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}


def special(name, **settings):
    return AddedToken(name, special=True, **{"normalized": False, **settings})


def corpus():
    """English, code, numbers and several scripts, with words frequent enough to be merged."""
    words = ("the of and to in is that for it was on are as with they be at one have this from or had by word but "
             "what some we can out other were all there when up use your how said each she which their time if will "
             "way about many then them would like so these her long make thing see him two has look more day could go "
             "come did my sound no most number who over know water than call first people may down side been now").split()
    others = ("größer Straße café naïve où élève señor mañana ação ångström Привет мир как дела это было слово "
              "你好 世界 语言 模型 日本語 ひらがな カタカナ 한국어 안녕하세요 مرحبا بالعالم שלום नमस्ते दुनिया "
              "สวัสดี γλώσσα λόγος 👍🏽 👩‍💻 🎉 → ≤ ∑ € £").split()
    code = ["int main(int argc, char** argv) {\n    return 0;\n}\n", "def f(x):\n\treturn x + 1\n\n",
            "for (size_t i = 0; i < n; ++i) sum += a[i];\r\n", "<div class=\"x\">\n  text\n</div>\n"]
    rng = random.Random(1)
    for _ in range(3000):
        line = [rng.choice(words) for _ in range(rng.randint(3, 12))]
        if rng.random() < 0.5:
            line[rng.randrange(len(line))] = rng.choice(others)
        if rng.random() < 0.3:
            line[rng.randrange(len(line))] = str(rng.randint(0, 99999))
        if rng.random() < 0.2:
            line[rng.randrange(len(line))] += rng.choice(["'s", "'ll", "n't", "'RE", "'d"])
        text = " ".join(line)
        yield text[0].upper() + text[1:] + rng.choice([".", "!", "?", ",", ".\n", "...\n\n", "  "])
        if rng.random() < 0.1:
            yield rng.choice(code)


def train(name, pre_tokenizer, normalizer, merges, first=(), last=()):
    """tokenizer.json as a value; `first` and `last`: added tokens before and after the others."""
    bare = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": normalizer,
            "pre_tokenizer": pre_tokenizer, "post_processor": None, "decoder": DECODER,
            "model": json.loads(Tokenizer(models.BPE()).to_str())["model"]}
    tokenizer = Tokenizer.from_str(json.dumps(bare))
    trainer = trainers.BpeTrainer(vocab_size=256 + merges + len(first), special_tokens=list(first), show_progress=False,
                                  initial_alphabet=ByteLevel.alphabet())
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_tokens(list(last))
    made = json.loads(tokenizer.to_str())
    print(f"{name}: {len(made['model']['vocab'])} tokens, {len(made['model']['merges'])} merges")
    return made


def train_sentencepiece(merges):
    """As SentencePiece's BPE models are converted: characters, and tokens for bytes; Llama 2's normalizers and decoder."""
    first = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    # The rarer characters are left to their bytes.
    trainer = trainers.BpeTrainer(vocab_size=len(first) + 150 + merges, special_tokens=first, show_progress=False,
                                  limit_alphabet=150)
    trained.train_from_iterator(corpus(), trainer)
    made = json.loads(trained.to_str())
    print(f"llama2: {len(made['model']['vocab'])} tokens, {len(made['model']['merges'])} merges")
    made["added_tokens"] = made["added_tokens"][:3]
    made["model"].update(unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    made["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, SPACES]}
    made["pre_tokenizer"] = None
    piece = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    made["post_processor"] = {"type": "TemplateProcessing", "single": piece, "pair": piece + piece[1:],
                              "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}}
    made["decoder"] = {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}
    return made


def make_tokenizers():
    """The published forms, by file name."""
    gpt2 = train("gpt2", byte_level(True), None, 400, last=[special("<|endoftext|>", normalized=True)])
    # An older form: no "type" and no "use_regex", merges as strings; the end of text is in the vocabulary.
    gpt2["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    gpt2["post_processor"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False}
    gpt2["decoder"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}
    gpt2["model"]["vocab"]["<|endoftext|>"] = len(gpt2["model"]["vocab"])
    gpt2["model"] = {"dropout": None, "unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": "",
                     "fuse_unk": False, "vocab": gpt2["model"]["vocab"],
                     "merges": [" ".join(merge) for merge in gpt2["model"]["merges"]]}

    names = ("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|eot_id|>")
    llama3 = train("llama3", sequence(split(LLAMA3_PATTERN), byte_level(False)), None, 400)
    llama3["model"]["ignore_merges"] = True
    for whole in ("Ġxylophone", "999"):   # not reachable by merges
        llama3["model"]["vocab"][whole] = len(llama3["model"]["vocab"])
    llama3["added_tokens"] = [
        {"id": len(llama3["model"]["vocab"]) + i, "content": name, "single_word": False, "lstrip": False,
         "rstrip": False, "normalized": False, "special": True} for i, name in enumerate(names)]
    begin = llama3["added_tokens"][0]["id"]
    piece = [{"SpecialToken": {"id": names[0], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    llama3["post_processor"] = {"type": "Sequence", "processors": [
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
        {"type": "TemplateProcessing", "single": piece,
         "pair": piece + [{"SpecialToken": {"id": names[0], "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}}],
         "special_tokens": {names[0]: {"id": names[0], "ids": [begin], "tokens": [names[0]]}}}]}

    qwen2 = train("qwen2.5", sequence(split(QWEN2_PATTERN), byte_level(False)), {"type": "NFC"}, 400,
                  last=[special("<|endoftext|>"), special("<|im_start|>"), special("<|im_end|>"),
                        AddedToken("<tool_call>", normalized=False), AddedToken("</tool_call>", normalized=False)])
    qwen2["post_processor"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False,
                               "use_regex": False}

    smollm2 = train("smollm2", sequence({"type": "Digits", "individual_digits": True}, byte_level(True)), None, 400,
                    first=[special(name) for name in ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>")])
    return {"gpt2.json": gpt2, "llama3.json": llama3, "qwen2.5.json": qwen2, "smollm2.json": smollm2,
            "llama2.json": train_sentencepiece(400)}


def patches(made):
    """(name, file, patch): the published forms, and variants that share their vocabularies."""
    for file in made:
        yield file.removesuffix(".json"), file, {}
    added = [{"id": 700 + i, "content": content, "single_word": False, "lstrip": lstrip, "rstrip": rstrip,
              "normalized": normalized, "special": normalized}
             for i, (content, lstrip, rstrip, normalized) in enumerate([
                 ("<left>", True, False, False), ("<right>", False, True, False), ("<both>", True, True, True),
                 ("<b", False, False, False), ("ab", False, False, True), ("abc", False, False, True),
                 ("\u1112\u1161\u11ab", False, False, True), ("cafe\u0301", False, False, False)])]
    added = [token for token in made["qwen2.5.json"]["added_tokens"]] + added
    # ids in file order, which the library reassigns
    base = made["qwen2.5.json"]["added_tokens"][0]["id"]
    yield "added tokens", "qwen2.5.json", {"added_tokens": [{**token, "id": base + i} for i, token in enumerate(added)]}
    yield "prefix space", "gpt2.json", {"pre_tokenizer": byte_level(True, add_prefix_space=True)}
    yield "prefix space of pieces", "qwen2.5.json", {
        "pre_tokenizer": sequence(split(QWEN2_PATTERN), byte_level(False, add_prefix_space=True))}
    yield "one piece", "gpt2.json", {"pre_tokenizer": byte_level(False)}
    yield "runs of digits", "smollm2.json", {
        "pre_tokenizer": sequence({"type": "Digits", "individual_digits": False}, byte_level(True))}
    yield "gpt-4o", "llama3.json", {"pre_tokenizer": sequence(split(GPT4O_PATTERN), byte_level(False))}
    yield "deepseek-v3", "qwen2.5.json", {
        "normalizer": {"type": "Sequence", "normalizers": []},
        "pre_tokenizer": sequence(split(r"\p{N}{1,3}"), split("[一-龥\u3040-ゟ゠-ヿ]+"), split(DEEPSEEK_PATTERN),
                                  byte_level(False))}
    yield "possessive", "llama3.json", {"pre_tokenizer": sequence(split(POSSESSIVE_PATTERN), byte_level(False))}


    metaspace = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}
    yield "mistral", "llama2.json", {"normalizer": None, "pre_tokenizer": metaspace}
    yield "metaspace, always and split", "llama2.json", {
        "normalizer": None, "pre_tokenizer": {**metaspace, "prepend_scheme": "always", "split": True}}
    gemma = copy.deepcopy(made["llama2.json"])
    gemma["decoder"]["decoders"].pop()   # it prepends nothing
    yield "gemma", "llama2.json", {
        "normalizer": SPACES, "decoder": gemma["decoder"], "pre_tokenizer": {
            "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
        "added_tokens": gemma["added_tokens"] + [
            {"id": len(gemma["model"]["vocab"]) + i, "content": content, "single_word": False, "lstrip": False,
             "rstrip": False, "normalized": False, "special": False} for i, content in enumerate(["\n\n\n", "<b"])]}


TEXTS = [
    "Hello world, this is a test of the tokenizer.", "", " ", "  ", "\n", "\r\n", "\t", "a", " a", "a ", "  a  b   c ",
    "word\n\n\nword\r\n\r\n  word \n \n", "\n\n   \n indented\n\t\ttabs\n    spaces", "end   ", "   \n", " \n ", "\n \t\r",
    "I'm you're he's we'll they'd I've don't", "I'M YOU'RE HE'S WE'LL THEY'D I'VE DON'T", "he'\u017f it'\u017fs K's 'S",
    "\u212a \u212aelvin 10\u212a '\u212a 'k", "''' 'x 's 'tis rock'n'roll l'été ' s", "’s you’re",
    "0 1 12 123 1234 12345 1234567890 3.14159 1,000,000 1e-5 0x1f", "x1y22z333 a1b2c3 v2.0 2024-01-02T03:04:05",
    "٠١٢٣٤٥٦٧٨٩ ०१२३ ๑๒๓ ⅷ Ⅻ ½ ¾ ²³ ① ㊿ 𝟘𝟙 〇一二三 ௰ 𐄇 a٣b", "!!! ??? ... --- ***bold*** $5 #tag @user 50% a/b c\\d <p>",
    "é e\u0301 ê\u0301 ệ e\u0323\u0302 a\u0315\u0300 \u1e9b\u0323 \u0344 Å \u212b \u2126 ﬁ ﬀ \u00bd",
    "\u1112\u1161\u11ab\u1100\u116e\u11a8 한국 \uac00\u11a8 \u1100\u1161\u11a7 \u1161\u1100 \ud55c\u11ab",
    "क\u093c \u0958 ড\u09bc \u09c7\u09be \u0dd9\u0dcf\u0dca \u2add \u2adc\u0338 \ufb1d \ufb4c \uf900 \u8c48",
    "👍 👍🏽 👩‍💻 👨‍👩‍👧‍👦 🇩🇪🇫🇷 ☺\ufe0f 1\ufe0f\u20e3 🎉🎉🎉", "你好，世界！語言模型。日本語のテスト カタカナ ひらがな",
    "한국어 안녕하세요", "مرحبا بالعالم ٱلسَّلَامُ عَلَيْكُمْ שָׁלוֹם", "नमस्ते दुनिया สวัสดีชาวโลก ខ្មែរ မြန်မာ",
    "Привет, как дела? Γειά σου Κόσμε ΰ ΐ", "Straße GROẞE ŉ ǰ İstanbul ı ǅ ǆ Ω ſ", "Z̴̡̛͎a̶͓̕l̷̢͑g̸̣̈́o̴̮͋",
    "a\u00a0b\u2003c\u3000d\u200be\u2028f\u2029g\u0085h\u1680i\u180ej\ufeffk\u205fl\u202fm",
    "\u00a0\u00a0word \u3000\u3000word\u2003\u2003 \u2028\u2028x", " \u00a0 x\u00a0\n\u00a0 y",
    "\x00\x01\x02\x07\x08\x0b\x0c\x1b\x1c\x1d\x1e\x1f\x7f\x80\x9f", "a\x0bb\x0cc \x0b\x0c d\x1ce\x1ff",
    "\ufffd\ufffe\uffff \U0010ffff \ue000 \U000e0041 \U0001e900\U0001e943 \u0378 𐐀𐐨 𝒳 𠀀𪜀",
    "\u2581a \u2581 b\u2581\u2581c", "</s>a <s> b</s>", "<0x41><0x0A>",
    "<|endoftext|>", "a<|endoftext|>b", "a <|endoftext|> b<|endoftext|><|endoftext|>", "<|endoftext|", "<|endoftext|>>",
    "<|begin_of_text|>hi<|eot_id|>\n<|end_of_text|>", "<|im_start|>user\nhi<|im_end|>\n<tool_call>{}</tool_call>",
    "  <left>  x  <right>  y  <both>  z<right><left>  <both><both>  <b <bo", "abcab ababc abab cab \u1112\u1161\u11ab 한 cafe\u0301 café",
    " xylophone xylophone 999 9999 999999", "int main(int argc, char** argv) {\n    return 0;\n}\n",
    "def f(x):\n\treturn x + 1  # comment\r\n\r\n", "https://example.com/a?b=c&d=e#f user.name+tag@example.org",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "thethethethethe thingthingthing therethere otherthanthe", "ALLCAPS CamelCase camelCase snake_case XMLHttpRequest's HTTPServer'LL",
    "x" + " " * 40 + "y" + "\n" * 20 + "z" + "=" * 50 + "\n/*/\n//\n", "mixed混合текст with日本and한국 in1one",
]


def random_texts(seed, count):
    """Strings of difficult characters of several kinds, and of pieces of the texts above."""
    rng = random.Random(seed)
    # The rest is unassigned in Unicode 16, or digits on which the library's parts disagree.
    known = [chr(c) for c in range(0x110000) if unicodedata.category(chr(c)) not in ("Cs", "Cn")]
    pools = [known, [c for c in known if unicodedata.combining(c)], [c for c in known if unicodedata.decomposition(c)],
             [c for c in known if unicodedata.category(c)[0] == "N"], [c for c in known if c.isspace()],
             [chr(c) for c in range(0x1100, 0x1200)] + [chr(c) for c in range(0xac00, 0xd7a4)],
             [chr(c) for c in range(0x4e00, 0x9fff)], [chr(c) for c in range(0x20, 0x7f)], list("abcdeE'sSlLtT"),
             list(" \n\r\t"), list("0123456789"), list("'\u017fkK\u212aréveREVE"), list(".,;:!?/-_=*#\"'()[]{}<>|\\"),
             ["<|endoftext|>", "<|im_start|>", "<|eot_id|>", "<left>", "<right>", "<both>", "<tool_call>", "abc", "'re", "'LL"],
             "the there other people water größer Привет 世界 한국어 نص".split()]
    texts = []
    while len(texts) < count:
        if rng.random() < 0.2:
            text = rng.choice(TEXTS)
            i, j = sorted(rng.randint(0, len(text)) for _ in range(2))
            texts.append(text[i:j] + rng.choice(TEXTS)[rng.randint(0, 10):][:20])
            continue
        chosen = rng.sample(pools, rng.randint(1, 4))
        texts.append("".join(rng.choice(rng.choice(chosen)) for _ in range(rng.randint(0, 40))))
    return texts


def write_cases(path, made, texts):
    cases = {"library": f"tokenizers {tokenizers.__version__}", "texts": texts, "tokenizers": []}
    for name, file, patch in patches(made):
        patched = copy.deepcopy(made[file])
        patched.update(patch)
        tokenizer = Tokenizer.from_str(json.dumps(patched))
        ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        decoded = [tokenizer.decode(one, skip_special_tokens=False) for one in ids]
        cases["tokenizers"].append({
            "name": name, "file": file, "patch": patch, "ids": ids, "templated": tokenizer.encode(texts[0]).ids,
            "decoded": [None if back == text else back for back, text in zip(decoded, texts)]})
    with open(path, "w", encoding="ascii") as file:
        json.dump(cases, file, separators=(",", ":"))
        file.write("\n")


def main():
    if len(sys.argv) == 4 and sys.argv[1] == "--random":
        made = {}
        for file in ("gpt2.json", "llama3.json", "qwen2.5.json", "smollm2.json", "llama2.json"):
            with open(os.path.join(HERE, file), encoding="utf-8") as opened:
                made[file] = json.load(opened)
        write_cases(sys.argv[3], made, random_texts(int(sys.argv[2]), 2000))
    elif len(sys.argv) == 1:
        os.makedirs(HERE, exist_ok=True)
        made = make_tokenizers()
        for file, value in made.items():
            with open(os.path.join(HERE, file), "w", encoding="utf-8") as opened:
                json.dump(value, opened, ensure_ascii=False, separators=(",", ":"))
                opened.write("\n")
        write_cases(os.path.join(HERE, "cases.json"), made, TEXTS)
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
