"""Signatures taken from live model classes; the only module of the compiler that imports torch's `nn`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import nn

from loadplan.compiler.patterns import matches_components
from loadplan.compiler.signature import Signature, SignatureError, Submodel, UnknownArchitecture
from loadplan.runtime.dtype import DType
from loadplan.runtime.tensor_type import TensorType
from loadplan.runtime.torch_types import dtype_of, torch_dtype_named


def read_module(module: nn.Module) -> Signature:
    """The signature of `module`; shapes and dtypes are those of its parameters and buffers as they are."""
    state = module.state_dict(keep_vars=True)
    tensors = tuple((name, _type(name, tensor)) for name, tensor in state.items())
    owners: dict[int, list[str]] = defaultdict(list)
    for name, tensor in state.items():
        owners[id(tensor)].append(name)
    buffers = tuple(name for name, _ in module.named_buffers(remove_duplicate=False) if name not in state)
    return Signature(
        tensors=tensors,
        ties=tuple(tuple(names) for names in owners.values() if len(names) > 1),
        computed_buffers=buffers,
        base_model_prefix=str(getattr(module, "base_model_prefix", "") or ""),
        model_class=type(module).__name__,
        submodels=tuple(_submodels(module)),
    )


def _submodels(module: nn.Module) -> Iterator[Submodel]:
    """Modules that have a config with a model type, as transformers' models do, in the order of `named_modules`."""
    for path, inner in module.named_modules():
        model_type = getattr(getattr(inner, "config", None), "model_type", None)
        if isinstance(model_type, str) and hasattr(inner, "base_model_prefix"):
            yield Submodel(path, type(inner).__name__, model_type)


def read_config(config: Mapping[str, object], dtype: object | None = None) -> Signature:
    """The signature of the transformers model that `config` names, built on the meta device in `dtype`.

    `dtype` None is the config's own (`dtype`, or `torch_dtype` in older files), else float32. Parameters that the class
    keeps in float32 are declared so (transformers_spec 3.3, by whole name components).

    Raises:
        UnknownArchitecture: transformers is not installed, or has no such class.
        SignatureError: the class cannot be built from this config.
    """
    try:
        import transformers
    except ImportError as error:
        raise UnknownArchitecture("transformers is not installed") from error
    fields = dict(config)
    model_type = fields.pop("model_type", None)
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    model_class = getattr(transformers, name, None)
    if not isinstance(model_type, str) or not (isinstance(model_class, type) and issubclass(model_class, nn.Module)):
        raise UnknownArchitecture(
            f"transformers {transformers.__version__} has no class {name!r} of type {model_type!r}"
        )
    try:
        wanted = torch_dtype_named(str(dtype or config.get("dtype") or config.get("torch_dtype") or "float32"))
        parsed = transformers.AutoConfig.for_model(model_type, **fields)
        with torch.device("meta"):
            model = model_class._from_config(parsed, dtype=wanted)  # type: ignore[attr-defined]
    except Exception as error:  # whatever a model class raises at construction, the config is what was wrong
        raise SignatureError(f"transformers cannot build {name} from this config: {error}") from error
    return _keep_in_float32(read_module(model), model, wanted)


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
