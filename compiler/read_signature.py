"""Signatures taken from live model classes; the only module of the compiler that imports torch's `nn`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import torch
from torch import nn

from loadplan.compiler.patterns import matches_components
from loadplan.compiler.signature import Signature, SignatureError, Submodel, UnknownArchitecture
from loadplan.runtime.dtype import DType
from loadplan.runtime.memory import memory_of
from loadplan.runtime.plan import Constant
from loadplan.runtime.tensor_type import TensorType
from loadplan.runtime.torch_types import dtype_of, torch_dtype_named

_MAX_CONSTANT_NBYTES = 16 << 20  # a buffer larger than this is a mask, which models make when they run


def read_module(module: nn.Module) -> Signature:
    """The signature of `module`; shapes and dtypes are those of its parameters and buffers as they are.

    A plain module that holds one model of transformers and nothing else is that model: its own path is no part of
    names, so that rules find what they are written for (cases B09). Load into the model inside.
    """
    module = _unwrapped(module)
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


def _initialized(model: nn.Module) -> Iterator[Constant]:
    """The values that a transformers model on the meta device gives its non-persistent buffers.

    Each module with such buffers is initialised as `from_pretrained` does it, by `_init_weights` of the model that it is
    part of, once with buffers of zeros and once of ones: what comes out equal is what the code computes. A buffer that
    `_init_weights` does not know is left as it was, and is not a constant (transformers_spec 9.1, 16).
    """
    owner: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        above = owner.get(path.rpartition(".")[0], model)
        owner[path] = module if hasattr(module, "_init_weights") else above
        names = [
            name
            for name in sorted(module._non_persistent_buffers_set)
            if (buffer := module._buffers.get(name)) is not None and buffer.is_meta and _is_small(buffer)
        ]
        initialize = getattr(owner[path], "_init_weights", None)
        if not names or initialize is None:
            continue
        before = {name: module._buffers[name] for name in names}
        trials: list[dict[str, torch.Tensor]] = []
        try:
            for fill in (0, 1):
                for name, buffer in before.items():
                    module._buffers[name] = torch.full_like(buffer, fill, device="cpu")
                with torch.no_grad(), torch.random.fork_rng(devices=[]):
                    initialize(module)
                trials.append({name: module._buffers[name].clone() for name in names})
        except (RuntimeError, NotImplementedError, AttributeError, TypeError, ValueError):
            continue  # it needs more than buffers: their values are not known here
        finally:
            module._buffers.update(before)
        for name in names:
            if torch.equal(*(trial[name] for trial in trials)):
                yield _constant(f"{path}.{name}" if path else name, trials[0][name])


def _submodels(module: nn.Module) -> Iterator[Submodel]:
    """Modules that have a config with a model type, as transformers' models do, in the order of `named_modules`."""
    for path, inner in module.named_modules():
        model_type = getattr(getattr(inner, "config", None), "model_type", None)
        if isinstance(model_type, str) and hasattr(inner, "base_model_prefix"):
            is_custom = not type(inner).__module__.startswith("transformers.")
            yield Submodel(path, type(inner).__name__, model_type, is_custom)


def read_config(config: Mapping[str, object], dtype: object | None = None) -> Signature:
    """The signature of the transformers model that `config` names, built on the meta device in `dtype`.

    `dtype` None is the config's own (`dtype`, or `torch_dtype` in older files), else float32. Parameters that the class
    keeps in float32 are declared so (transformers_spec 3.3, by whole name components).

    Raises:
        UnknownArchitecture: transformers is not installed, or has no such class.
        SignatureError: the class cannot be built from this config.
    """
    return read_pretrained(build_model(config, dtype))


def build_model(config: Mapping[str, object], dtype: object | None = None) -> nn.Module:
    """The transformers model that `config` names, on the meta device; arguments and errors are `read_config`'s."""
    try:
        import transformers
    except ImportError as error:
        raise UnknownArchitecture("transformers is not installed") from error
    model_type = config.get("model_type")
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    model_class = _find_class(name, model_type) if isinstance(model_type, str) else None
    if model_class is None or not isinstance(model_type, str):
        raise UnknownArchitecture(
            f"transformers {transformers.__version__} has no class {name!r} of type {model_type!r}"
        )
    config_class = _config_class(model_class, model_type)
    try:
        wanted = torch_dtype_named(str(dtype or config.get("dtype") or config.get("torch_dtype") or "float32"))
        parsed = config_class.from_dict(_with_floats(config))  # type: ignore[attr-defined]
        with torch.device("meta"):
            model: nn.Module = model_class._from_config(parsed, dtype=wanted)  # type: ignore[attr-defined]
    except Exception as error:  # whatever a model class raises at construction, the config is what was wrong
        raise SignatureError(f"transformers cannot build {name} from this config: {error}") from error
    return model


def read_pretrained(model: nn.Module) -> Signature:
    """The signature of a transformers model, with what its classes keep in float32 declared so."""
    signature = _keep_in_float32(read_module(model), model, getattr(model, "dtype", torch.float32))
    return replace(signature, constants=(*signature.constants, *_initialized(model)))


def _find_class(name: str, model_type: str) -> type[nn.Module] | None:
    """The model class of that name: of those that transformers exports, else of the type's folder, else of any."""
    import transformers
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    found = getattr(transformers, name, None)
    root = Path(transformers.__file__).parent / "models"
    own = root.joinpath(*model_type_to_module_name(model_type).split("."))
    if found is None and name.isidentifier():
        for path in (*sorted(own.glob("modeling_*.py")), *sorted(root.glob("*/modeling_*.py"))):
            if re.search(rf"^class {name}\(", path.read_text(encoding="utf-8"), re.MULTILINE):
                found = getattr(import_module(f"transformers.models.{path.parent.name}.{path.stem}"), name, None)
                break
    return found if isinstance(found, type) and issubclass(found, nn.Module) else None


def _config_class(model_class: type[nn.Module], model_type: str) -> type[object]:
    """The config class of the type, where `model_class` takes it, else that of `model_class` (a borrowed class).

    Raises:
        SignatureError: the type is that of a part of the model, whose class would fill in the rest with defaults.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    declared = getattr(model_class, "config_class", None)
    try:
        of_type: type[object] = CONFIG_MAPPING[model_type]
    except KeyError:
        of_type = object
    if declared is None or issubclass(of_type, declared):
        return of_type
    parts = [field for field, kind in getattr(declared, "sub_configs", {}).items() if kind is of_type]
    if parts:
        alone = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
        hint = f"; the class of this type alone is {alone}" if isinstance(alone, str) else ""
        raise SignatureError(
            f"{model_class.__name__} takes a config of type {declared.model_type!r}, and this one of type {model_type!r} "
            f"is only the {parts[0]} in it{hint}"
        )
    return declared  # type: ignore[no-any-return]


def _with_floats(value: object) -> object:
    """A config with the floats that JSON has not, which transformers writes as `{"__float__": "Infinity"}`."""
    if isinstance(value, Mapping):
        text = value.get("__float__")
        if len(value) == 1 and text in ("Infinity", "-Infinity", "NaN"):
            return float(text)
        return {key: _with_floats(item) for key, item in value.items()}
    return [_with_floats(item) for item in value] if isinstance(value, list) else value


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
