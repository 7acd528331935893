#!/usr/bin/env python3
"""Makes small files of tokens with the tools of others, and the samples that those read from them:

    python3 -m pip install numpy && python3 -m pip install --no-deps megatron-core
    python3 test/golden/make_token_files.py           token_files/*; samples.json has the samples of T tokens

nanogpt.bin    numpy's tofile() of uint16, as nanoGPT's prepare.py files; sample k: get_batch() at its k-th multiple of T
olmo.npy       a numpy.memmap of uint32, as OLMo's tools write; sample k: chunk k of its MemMapDataset
megatron_TYPE.bin, .idx     Megatron's IndexedDatasetBuilder; sample k: entry k of the sample index that Megatron builds
               for one epoch in file order, read through its IndexedDataset; and where the documents begin

The committed files were made with numpy 2.4.6 and megatron-core 0.16.1.
"""
import glob
import importlib.util
import json
import os
import random
import sys
import types
from unittest import mock

import numpy

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "token_files")
T, VOCABULARY, END = 8, 120, 119


def megatron_module(name):
    """A module of megatron.core.datasets without the rest of the package, which needs PyTorch."""
    folder = next(path for path in map(lambda p: os.path.join(p, "megatron/core/datasets"), sys.path) if os.path.isdir(path))
    torch = types.ModuleType("torch")
    torch.utils, torch.Tensor = types.SimpleNamespace(data=types.SimpleNamespace(Dataset=object)), object
    storage, multi = mock.MagicMock(), mock.MagicMock()
    storage.is_object_storage_path = lambda path: False
    multi.MultiStorageClientFeature.is_enabled = lambda: False
    with mock.patch.dict(sys.modules, {"torch": torch, "megatron": mock.MagicMock(), "megatron.core": mock.MagicMock(),
                                       "megatron.core.datasets": mock.MagicMock(),
                                       "megatron.core.datasets.object_storage_utils": storage,
                                       "megatron.core.msc_utils": multi, "megatron.core.utils": mock.MagicMock()}):
        spec = importlib.util.spec_from_file_location(name, glob.glob(f"{folder}/{name}.*")[0])
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


class Item(list):
    """What the builder takes for a tensor."""
    def numpy(self):
        return numpy.array(self)


def write_megatron(builder_module, helpers, documents, dtype):
    """documents: lists of sequences."""
    prefix = f"{HERE}/megatron_{dtype.__name__}"
    builder = builder_module.IndexedDatasetBuilder(prefix + ".bin", dtype=dtype)
    for document in documents:
        for sequence in document:
            builder.add_item(Item(sequence))
        builder.end_document()
    builder.finalize(prefix + ".idx")

    data = builder_module.IndexedDataset(prefix)
    lengths, order = data.sequence_lengths, numpy.arange(len(data), dtype=numpy.int32)
    index = helpers.build_sample_idx_int32(lengths, order, T, 1, int(lengths.sum()), True, 1)
    samples = []
    for (first, begin), (last, end) in zip(index[:-1].tolist(), index[1:].tolist()):
        parts = [data.get(i, offset=begin if i == first else 0,
                          length=end + 1 - (begin if i == first else 0) if i == last else None) for i in range(first, last + 1)]
        samples.append(numpy.concatenate(parts).tolist())
    starts = numpy.cumsum([0] + [sum(map(len, document)) for document in documents])[:-1].tolist()
    return {"samples": samples, "documents": starts, "type": dtype.__name__}


def main():
    os.makedirs(HERE, exist_ok=True)
    draw = random.Random(1)
    documents = [[draw.randrange(END) for _ in range(draw.choice([1, 3, 9, 20, 31]))] + [END] for _ in range(12)]
    tokens = [token for document in documents for token in document]
    found = {"T": T}

    numpy.array(tokens, dtype=numpy.uint16).tofile(f"{HERE}/nanogpt.bin")
    data = numpy.memmap(f"{HERE}/nanogpt.bin", dtype=numpy.uint16, mode="r")
    found["nanogpt.bin"] = {"type": "uint16", "samples": [data[i:i + T].tolist() + data[i + 1:i + 1 + T].tolist()[-1:]
                                        for i in range(0, len(data) - T, T)]}

    data = numpy.memmap(f"{HERE}/olmo.npy", dtype=numpy.uint32, mode="w+", shape=(len(tokens),))
    data[:] = tokens
    data.flush()
    with open(f"{HERE}/olmo.npy", "rb") as file:
        chunks = []
        while len(chunk := file.read(4 * T)) == 4 * T:
            chunks.append(numpy.frombuffer(chunk, dtype=numpy.uint32).tolist())
    found["olmo.npy"] = {"type": "uint32", "samples": chunks}

    # Documents of one sequence, of several, and of none; sequences without tokens.
    sequences = [[document[:5], document[5:9], document[9:]] if i % 3 == 0 else [document] if i % 4 else []
                 for i, document in enumerate(documents)]
    builder_module, helpers = megatron_module("indexed_dataset"), megatron_module("helpers_cpp")
    for dtype in (numpy.uint8, numpy.int8, numpy.uint16, numpy.int16, numpy.int32, numpy.int64):
        found[f"megatron_{dtype.__name__}.bin"] = write_megatron(builder_module, helpers, sequences, dtype)
    with open(f"{HERE}/samples.json", "w") as file:
        json.dump(found, file)
        file.write("\n")


if __name__ == "__main__":
    main()
