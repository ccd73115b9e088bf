"""Signatures taken from live model classes; the only module of the compiler that imports torch's `nn`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import replace

import torch
from torch import nn

from loadplan.compiler.patterns import matches_components
from loadplan.compiler.signature import Signature, SignatureError, Submodel, UnknownArchitecture
from loadplan.runtime.build_model import (
    ModelError,
    UnknownModel,
    build_model,
    compute_buffers,
    record_config,
    record_of,
)
from loadplan.runtime.dtype import DType
from loadplan.runtime.fusion import find_fusions, fuse_modules
from loadplan.runtime.memory import memory_of
from loadplan.runtime.plan import Constant, FusedModule
from loadplan.runtime.tensor_type import TensorType
from loadplan.runtime.torch_types import dtype_of

_MAX_CONSTANT_NBYTES = 16 << 20  # a buffer larger than this is a mask, which models make when they run


def read_module(module: nn.Module, fusion_config: Mapping[str, object] | None = None) -> Signature:
    """The signature of `module`; shapes and dtypes are those of its parameters and buffers as they are.

    A plain module that holds one model of transformers and nothing else is that model: its own path is no part of
    names, so that rules find what they are written for (cases B09). Load into the model inside.

    Raises:
        FusionError: the fusions are unknown, in conflict, or find nothing to fuse.
    """
    module = _unwrapped(module)
    signature = _read(module)
    fusions = find_fusions(module, fusion_config)
    if not fusions:
        return signature
    copy = _meta_copy(module)
    remade = _fuse(copy, fusions)
    return replace(signature, fusions=fusions, fused=replace(_read(copy), remade=remade))


def _fuse(model: nn.Module, fusions: tuple[FusedModule, ...]) -> tuple[str, ...]:
    """Fuse modules of `model`; returns the names of tensors that it did not have before."""
    before = list(model.state_dict(keep_vars=True).values())  # held, so that no new one gets the identity of an old one
    fuse_modules(model, fusions)
    old = {id(tensor) for tensor in before}
    return tuple(name for name, tensor in model.state_dict(keep_vars=True).items() if id(tensor) not in old)


def _meta_copy(module: nn.Module) -> nn.Module:
    """`module` with its parameters, and the buffers of its state dict, on the meta device: the same names and ties."""
    state = module.state_dict(keep_vars=True)
    held: dict[int, object] = {}
    for tensor in (*module.parameters(), *state.values()):
        empty = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        held[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    return deepcopy(module, held)


def _read(module: nn.Module) -> Signature:
    state = module.state_dict(keep_vars=True)
    tensors = tuple((name, _type(name, tensor)) for name, tensor in state.items())
    owners: dict[int, list[str]] = defaultdict(list)
    for name, tensor in state.items():
        owners[id(tensor)].append(name)
    buffers = {name: b for name, b in module.named_buffers(remove_duplicate=False) if name not in state}
    return Signature(
        tensors=tensors,
        ties=tuple(tuple(names) for names in owners.values() if len(names) > 1),
        computed_buffers=tuple(buffers),
        constants=tuple(_constant(name, b) for name, b in buffers.items() if b.device.type != "meta" and _is_small(b)),
        base_model_prefix=str(getattr(module, "base_model_prefix", "") or ""),
        model_class=type(module).__name__,
        submodels=tuple(_submodels(module)),
        model=record_of(module),
    )


def _unwrapped(module: nn.Module) -> nn.Module:
    """The one outermost transformers model in `module`, if everything in it is that model's; else `module`."""
    first = next(_submodels(module), None)
    if first is None or not first.path:
        return module
    names = (*module.state_dict(keep_vars=True), *(name for name, _ in module.named_buffers()))
    return module.get_submodule(first.path) if all(name.startswith(f"{first.path}.") for name in names) else module


def _is_small(buffer: torch.Tensor) -> bool:
    return buffer.numel() * buffer.element_size() <= _MAX_CONSTANT_NBYTES


def _constant(name: str, buffer: torch.Tensor) -> Constant:
    value = buffer.detach().cpu().contiguous()
    return Constant(name, _type(name, value), bytes(memory_of(value)))


def _submodels(module: nn.Module) -> Iterator[Submodel]:
    """Modules that have a config with a model type, as transformers' models do, in the order of `named_modules`."""
    for path, inner in module.named_modules():
        model_type = getattr(getattr(inner, "config", None), "model_type", None)
        if isinstance(model_type, str) and hasattr(inner, "base_model_prefix"):
            is_custom = not type(inner).__module__.startswith("transformers.")
            yield Submodel(path, type(inner).__name__, model_type, is_custom)


def read_config(
    config: Mapping[str, object], dtype: object | None = None, fusion_config: Mapping[str, object] | None = None
) -> Signature:
    """The signature of the transformers model that `config` names, built on the meta device in `dtype`.

    `dtype` None is the config's own (`dtype`, or `torch_dtype` in older files), else float32. Parameters that the class
    keeps in float32 are declared so (transformers_spec 3.3, by whole name components). `fusion_config` None is the
    config's own.

    Raises:
        UnknownArchitecture: transformers is not installed, or has no such class.
        SignatureError: the class cannot be built from this config.
        FusionError: the fusions are unknown, in conflict, or find nothing to fuse.
    """
    try:
        model = build_model(config, dtype)
    except UnknownModel as error:
        raise UnknownArchitecture(str(error)) from error
    except ModelError as error:
        raise SignatureError(str(error)) from error
    signature = replace(read_pretrained(model), model=record_config(type(model).__name__, config, model))
    fusions = find_fusions(model, config.get("fusion_config") or {} if fusion_config is None else fusion_config)
    if not fusions:
        return signature
    remade = _fuse(model, fusions)
    return replace(signature, fusions=fusions, fused=replace(read_pretrained(model), remade=remade))


def read_pretrained(model: nn.Module) -> Signature:
    """The signature of a transformers model, with what its classes keep in float32 declared so."""
    signature = _keep_in_float32(_read(_unwrapped(model)), model, getattr(model, "dtype", torch.float32))
    small = {name for name, buffer in model.named_buffers() if _is_small(buffer)}
    computed = (_constant(name, value) for name, value in compute_buffers(model, small))
    return replace(signature, constants=(*signature.constants, *computed))


def _keep_in_float32(signature: Signature, model: nn.Module, dtype: torch.dtype) -> Signature:
    """The types after what the classes of `model` keep in float32 when the rest is in half precision."""
    attributes = {
        torch.float16: ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"),
        torch.bfloat16: ("_keep_in_fp32_modules_strict",),
    }.get(dtype, ())
    patterns = {
        pattern
        for module in model.modules()
        for attribute in attributes
        for pattern in getattr(module, attribute, None) or ()
    }
    tensors = tuple(
        (name, TensorType(kind.shape, DType.F32))
        if kind.dtype.is_float and any(matches_components(pattern, name) for pattern in patterns)
        else (name, kind)
        for name, kind in signature.tensors
    )
    return replace(signature, tensors=tensors)


def _type(name: str, tensor: torch.Tensor) -> TensorType:
    dtype = dtype_of(tensor.dtype)
    if dtype is None:
        raise SignatureError(f"{name!r} has dtype {tensor.dtype}, which safetensors cannot hold")
    return TensorType(tuple(tensor.shape), dtype)
