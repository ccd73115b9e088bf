"""Checkpoint files, written byte by byte or by transformers: nothing here uses loadplan."""

from __future__ import annotations

import ctypes
import json
import math
import random
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
"""Bits per element of each dtype that the format names (crate `safetensors` 0.8, `Dtype::bitsize`)."""


@dataclass(frozen=True)
class Raw:
    """A tensor as a file holds it."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def raw(dtype: str, *shape: int, seed: int = 0) -> Raw:
    """A tensor of arbitrary bytes; the same for the same arguments. Booleans are 0 and 1."""
    numel = 1
    for extent in shape:
        numel *= extent
    data = random.Random(f"{dtype}{shape}{seed}").randbytes(numel * BITS[dtype] // 8)
    return Raw(dtype, shape, bytes(byte & 1 for byte in data) if dtype == "BOOL" else data)


def filled(value: float, *shape: int) -> Raw:
    """An F32 tensor of one value."""
    return Raw("F32", shape, bytes_of(torch.full(shape, value, dtype=torch.float32)))


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The elements of a CPU tensor, dense and row-major, as they lie in memory."""
    dense = tensor.detach().contiguous()
    return ctypes.string_at(dense.data_ptr(), dense.numel() * dense.element_size()) if dense.numel() else b""


def safetensors_bytes(tensors: Mapping[str, Raw], *, align: int = 8) -> bytes:
    """A safetensors file; the data lies in the order of `tensors`. `align` 1 leaves the header unpadded."""
    header: dict[str, object] = {}
    data = b""
    for name, tensor in tensors.items():
        begin, data = len(data), data + tensor.data
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, len(data)]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % align)
    return len(text).to_bytes(8, "little") + text + data


def write_file(path: Path, tensors: Mapping[str, Raw], *, align: int = 8) -> Path:
    """Write a safetensors file, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(safetensors_bytes(tensors, align=align))
    return path


def write_index(path: Path, weight_map: Mapping[str, object], **more: object) -> Path:
    """Write an index, with `more` beside its weight_map, and return its path."""
    path.write_text(json.dumps({**more, "weight_map": dict(weight_map)}), encoding="utf-8")
    return path


def write_shards(
    folder: Path, shards: Mapping[str, Mapping[str, Raw]], *, index: str | None = "model.safetensors.index.json"
) -> Path:
    """Write the files, and an index of them unless `index` is None; return the folder."""
    for file, tensors in shards.items():
        write_file(folder / file, tensors)
    if index is not None:
        write_index(folder / index, {name: file for file, tensors in shards.items() for name in tensors})
    return folder


def rewrite_zip(
    source: Path,
    target: Path,
    edit: Callable[[str, bytes], bytes] = lambda name, data: data,
    compression: int = zipfile.ZIP_STORED,
) -> Path:
    """Write a copy of a zip with `edit(name, data)` for the data of each record; return its path."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", compression) as new:
        for record in old.infolist():
            new.writestr(record.filename, edit(record.filename, old.read(record)))
    return target


def sparse_twin(index: Mapping[str, object], config: Mapping[str, object], folder: Path) -> Path:
    """Write the files that a published index names, with complete headers and a hole for data; return the folder.

    Args:
        index: the index as published; each of its files gets the tensors that it says, in name order.
        config: the config.json as published: a decoder named as Llama or Mixtral names it, which gives the shapes.
        folder: where the files go; they have their full size, and take no space on disk.
    """
    weight_map = index["weight_map"]
    assert isinstance(weight_map, dict)
    dtype = {"float32": "F32", "bfloat16": "BF16"}[str(config["torch_dtype"])]
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(set(weight_map.values())):
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in sorted(name for name, place in weight_map.items() if place == file):
            shape = decoder_shape(name, config)
            begin, end = end, end + math.prod(shape) * BITS[dtype] // 8
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with (folder / file).open("wb") as target:
            target.write(len(text).to_bytes(8, "little") + text)
            target.truncate(8 + len(text) + end)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def decoder_shape(name: str, config: Mapping[str, object]) -> tuple[int, ...]:
    """Shape of a stored tensor of a Llama or Mixtral decoder, from its name; in torch, a matrix is [outputs, inputs]."""
    sizes = {key: value for key, value in config.items() if isinstance(value, int)}
    hidden, inner, vocab = sizes["hidden_size"], sizes["intermediate_size"], sizes["vocab_size"]
    head = hidden // sizes["num_attention_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens": (vocab, hidden),
        "lm_head": (vocab, hidden),
        "q_proj": (sizes["num_attention_heads"] * head, hidden),
        "k_proj": (sizes["num_key_value_heads"] * head, hidden),
        "v_proj": (sizes["num_key_value_heads"] * head, hidden),
        "o_proj": (hidden, sizes["num_attention_heads"] * head),
        **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), (inner, hidden)),
        **dict.fromkeys(("down_proj", "w2"), (hidden, inner)),
        "gate": (sizes.get("num_local_experts", 0), hidden),
        **dict.fromkeys(("norm", "input_layernorm", "post_attention_layernorm"), (hidden,)),
    }
    return shapes[name.removesuffix(".weight").rpartition(".")[2]]


TINY_DECODER: Mapping[str, object] = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}
"""A config of transformers' decoders; smallest sizes that differ from each other where the model allows it."""


def save_tiny(
    folder: Path, model_class: str, config: Mapping[str, object], dtype: str, *, max_shard_size: str = "1GB"
) -> Path:
    """Let transformers make a model with random weights, always the same ones, and save it; return the folder."""
    import transformers

    quiet: Any = transformers.logging  # its functions have no types
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    found = getattr(transformers, model_class)
    model = found(found.config_class(**config)).to(getattr(torch, dtype))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():  # tied ones once
            values = torch.randn(parameter.shape, generator=generator) * 10 ** torch.randn((), generator=generator)
            parameter.copy_(values)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder
