"""Turns text into tokens: bytes, tiktoken, or a Hugging Face tokenizer.json."""

import json
import os

from programs import DataError
from token_shards import TokenFormat

# End-of-text of GPT-2 and Qwen; Llama 3; Llama 2 and Mistral; Gemma; others. llmc/text/tokenizer.h has the same list,
# and chooses in the same order.
USUAL_EOT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|eos|>", "<|im_end|>")


class ByteTokenizer:
    """One token per byte: ids 0-255 are the bytes, 256 is end of text."""

    def __init__(self):
        self.name, self.eot, self.vocab_size, self.for_trainer, self.has_prefix = "bytes", 256, 257, False, False
        self.format = TokenFormat(self.vocab_size)

    def encode(self, piece):
        packed = bytearray(2 * len(piece.text))
        packed[::2] = piece.text   # the low bytes of little-endian uint16
        return packed

    def token_bytes(self, token):
        return bytes([token]) if token < 256 else b"<|endoftext|>"


class TiktokenTokenizer:
    """GPT-2's tokenizer from the package `tiktoken`, or GPT-2's pattern with the ranks of a .tiktoken file."""

    GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""

    def __init__(self, name):
        """`name`: "gpt2" (the vocabulary is downloaded once), or the path of a .tiktoken file. DataError: unusable."""
        try:
            import tiktoken
            import tiktoken.load
        except ImportError:
            raise DataError(f"--tokenizer {name} needs the Python package 'tiktoken'; install it with: "
                            "python3 -m venv .venv && .venv/bin/pip install tiktoken, then run .venv/bin/python "
                            "data/...") from None
        try:
            if name == "gpt2":
                self._encoding = tiktoken.get_encoding("gpt2")
            else:
                ranks = tiktoken.load.load_tiktoken_bpe(name)
                self._encoding = tiktoken.Encoding(name, pat_str=self.GPT2_PATTERN, mergeable_ranks=ranks,
                                                   special_tokens={"<|endoftext|>": len(ranks)})
        except Exception as error:   # the package raises nothing narrower
            raise DataError(f"--tokenizer {name}: {error}; offline, give a .tiktoken file or a tokenizer.json"
                            ) from None
        self.name, self.eot, self.vocab_size = name, self._encoding.eot_token, self._encoding.n_vocab
        self.for_trainer = self.has_prefix = False
        self.format = TokenFormat(self.vocab_size)

    def encode(self, piece):
        return self.format.pack(self._encoding.encode_ordinary(utf8(piece)))

    def token_bytes(self, token):
        return self._encoding.decode_single_token_bytes(token)


class HuggingFaceTokenizer:
    """A tokenizer.json, by the package `tokenizers`. Special tokens in the text are encoded as plain text.

    has_prefix: a text begins with a space that the tokenizer puts there, as Llama 2's and Mistral's do.
    """

    LINE = "a\n"   # a continuation is encoded after this line

    def __init__(self, path, eot_name=None):
        """`eot_name`: the end-of-text token; None looks for the usual names. DataError: unusable."""
        try:
            import tokenizers
        except ImportError:
            raise DataError(f"--tokenizer {path} needs the Python package 'tokenizers'; install it with: "
                            "python3 -m venv .venv && .venv/bin/pip install tokenizers, then run "
                            ".venv/bin/python data/tokenize_text.py ...") from None
        if os.path.isdir(path):
            path = os.path.join(path, "tokenizer.json")
        if not os.path.isfile(path):
            raise DataError(f"{path}: no such file; --tokenizer takes 'bytes' or the path of a tokenizer.json")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(path)
        except Exception as error:   # the package raises nothing narrower
            raise DataError(f"{path}: not a Hugging Face tokenizer.json ({error})") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True   # as plain text: no document can forge an end-of-text token
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.name = path
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.for_trainer = isinstance(self._tokenizer.model, tokenizers.models.BPE)   # its --tokenizer reads this file
        self.format = TokenFormat(self.vocab_size)
        special = {token for token, added in self._tokenizer.get_added_tokens_decoder().items() if added.special}
        self.eot = vocabulary.get(eot_name) if eot_name else next(ends_of_text(path, vocabulary, special), None)
        if self.eot is None:
            raise DataError(f"{path}: the vocabulary has no token {eot_name or ' or '.join(USUAL_EOT)}; "
                            "name its end-of-text token with --eot")
        self._line = self._ids(self.LINE)
        self.has_prefix = self._ids(self.LINE + "b") != self._line + self._ids("b")

    def encode(self, piece):
        text = utf8(piece)
        if self.has_prefix and not piece.new_document:
            ids, n = self._ids(self.LINE + text), len(self._line)
            if ids[:n] == self._line:   # else a token joins the line to the text, such as two line breaks
                return self.format.pack(ids[n:])
        return self.format.pack(self._ids(text))

    def _ids(self, text):
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def token_bytes(self, token):
        """DataError: not a byte-level vocabulary, where every character stands for a byte."""
        text = self._tokenizer.id_to_token(token) or ""
        if token in self._tokenizer.get_added_tokens_decoder():
            return text.encode()
        try:
            return bytes(BYTE_OF_CHARACTER[character] for character in text)
        except KeyError as error:
            raise DataError(f"{self.name}: token {token} contains {error}, which stands for no byte; only byte-level "
                            "vocabularies such as GPT-2's can be written") from None


def ends_of_text(path, vocabulary, special):
    """Generates the tokens that may be the end of text, the likeliest first. DataError: a file beside is damaged."""
    usual = [vocabulary[name] for name in USUAL_EOT if name in vocabulary]
    yield from (token for token in usual if token in special)   # Gemma's "</s>" is none: it is HTML
    for name in ("tokenizer_config.json", "generation_config.json", "config.json"):
        beside = os.path.join(os.path.dirname(path), name)
        if not os.path.exists(beside):
            continue
        try:
            with open(beside, encoding="utf-8") as file:
                config = json.load(file)
            token, ids = config.get("eos_token"), config.get("eos_token_id")
        except (OSError, ValueError, AttributeError) as error:
            raise DataError(f"{beside}: not a JSON object ({error})") from None
        token = token.get("content") if isinstance(token, dict) else token
        end = ids[0] if isinstance(ids, list) and ids else ids
        yield from (id for name, id in vocabulary.items() if name == token)
        yield from (id for id in vocabulary.values() if id == end)
    yield from usual


def byte_level_characters():
    """GPT-2's visible character for each byte: itself where it is visible, else the next unused one from 256 on."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {**{chr(byte): byte for byte in visible}, **{chr(256 + i): byte for i, byte in enumerate(hidden)}}


BYTE_OF_CHARACTER = byte_level_characters()


def utf8(piece):
    try:
        return piece.text.decode()
    except UnicodeDecodeError as error:
        line = piece.line + piece.text.count(b"\n", 0, error.start)
        raise DataError(f"{piece.path}:{line}: byte {piece.text[error.start]:#04x} is not UTF-8; convert the "
                        "file to UTF-8, or use --tokenizer bytes") from None


def make_tokenizer(options):
    if options.tokenizer == "bytes":
        return ByteTokenizer()
    if options.tokenizer == "gpt2" or options.tokenizer.endswith(".tiktoken"):
        return TiktokenTokenizer(options.tokenizer)
    return HuggingFaceTokenizer(options.tokenizer, options.eot)
