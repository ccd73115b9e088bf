"""Models of transformers, built without their weights: for the compiler, which asks what they want, and for
`load_model`, which fills them. The only module of the runtime that imports transformers, and only when it is called.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from loadplan.cache.error import LoadplanError
from loadplan.runtime.plan import ModelRecord
from loadplan.runtime.torch_types import torch_dtype_named

LIBRARY = "transformers"


class ModelError(LoadplanError, ValueError):
    """A model cannot be built from what is known of it."""


class UnknownModel(ModelError):
    """No installed library knows the model class."""


def build_model(config: Mapping[str, object], dtype: object | None = None) -> nn.Module:
    """The transformers model that `config`, a config.json, names, on the meta device.

    `dtype` None is the config's own (`dtype`, or `torch_dtype` in older files), else float32.

    Raises:
        UnknownModel: transformers is not installed, or has no such class.
        ModelError: the class cannot be built from this config.
    """
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    return _build(name, config, dtype or config.get("dtype") or config.get("torch_dtype") or "float32")


def build_recorded(record: ModelRecord) -> nn.Module:
    """The model of a plan, on the meta device, as `build_model` makes it.

    The record may come from anywhere: the class is one of transformers' own, and no code of a hub is asked for.

    Raises:
        UnknownModel: transformers is not installed, or has no such class.
        ModelError: the record is malformed, or the class cannot be built from its config.
    """
    if record.library != LIBRARY:
        raise UnknownModel(
            f"the plan's model {record.class_name!r} is one of {record.library!r}, which is not known here"
        )
    config = _parse(record.config)
    for key in ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation"):
        if any("/" in str(value) for value in _find_all(config, key)):
            raise ModelError(f"the config of the model in the plan names code of a hub as {key}: compile without it")
    return _build(record.class_name, config, record.dtype)


def record_of(model: nn.Module) -> ModelRecord | None:
    """What builds a transformers model like `model` again; None if its class is not one of transformers'."""
    config: Any = getattr(model, "config", None)
    model_type = getattr(config, "model_type", None)
    if not type(model).__module__.startswith(f"{LIBRARY}.") or not isinstance(model_type, str):
        return None
    if _find_class(type(model).__name__, model_type) is not type(model):
        return None
    values = json.loads(config.to_json_string(use_diff=False)) | {
        "model_type": model_type
    }  # it writes its class's type
    return record_config(type(model).__name__, values, model)


def record_config(class_name: str, config: Mapping[str, object], model: nn.Module) -> ModelRecord:
    """The record of `model`, which was built from `config`; the same for configs that differ in layout only."""
    text = json.dumps(config, sort_keys=True, separators=(",", ":"), allow_nan=False)
    dtype = str(getattr(model, "dtype", torch.float32)).removeprefix("torch.")
    return ModelRecord(LIBRARY, class_name, dtype, text.encode())


def _build(name: str, config: Mapping[str, object], dtype: object) -> nn.Module:
    try:
        import transformers
    except ImportError as error:
        raise UnknownModel("transformers is not installed") from error
    model_type = config.get("model_type")
    model_class = _find_class(name, model_type) if isinstance(model_type, str) else None
    if model_class is None or not isinstance(model_type, str):
        raise UnknownModel(f"transformers {transformers.__version__} has no class {name!r} of type {model_type!r}")
    config_class = _config_class(model_class, model_type)
    try:
        wanted = torch_dtype_named(str(dtype))
        parsed = config_class.from_dict(_with_floats(config))  # type: ignore[attr-defined]
        with torch.device("meta"):
            model: nn.Module = model_class._from_config(parsed, dtype=wanted)  # type: ignore[attr-defined]
    except Exception as error:  # whatever a model class raises at construction, the config is what was wrong
        raise ModelError(f"transformers cannot build {name} from this config: {error}") from error
    return model


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
        ModelError: the type is that of a part of the model, whose class would fill in the rest with defaults.
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
        raise ModelError(
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


def _parse(data: bytes) -> dict[str, object]:
    try:
        value = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ModelError(f"the model's config in the plan is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError("the model's config in the plan is no JSON object")
    return value


def _find_all(value: object, key: str) -> Iterator[object]:
    """What stands under `key`, at any depth."""
    if isinstance(value, dict):
        yield from (item for name, item in value.items() if name == key)
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _find_all(item, key)


def compute_buffers(model: nn.Module, wanted: Collection[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """The values that a transformers model gives its non-persistent buffers on the meta device, of the `wanted` ones.

    Each module with such buffers is initialised as `from_pretrained` does it, by `_init_weights` of the model that it is
    part of, once with buffers of zeros and once of ones: what comes out equal is what the code computes. A buffer that
    `_init_weights` does not know is left as it was, and has no value (transformers_spec 9.1, 16).
    """
    owner: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        above = owner.get(path.rpartition(".")[0], model)
        owner[path] = module if hasattr(module, "_init_weights") else above
        names = [
            name
            for name in sorted(module._non_persistent_buffers_set)
            if (buffer := module._buffers.get(name)) is not None and buffer.is_meta
            if wanted is None or _join(path, name) in wanted
        ]
        initialize = getattr(owner[path], "_init_weights", None)
        if not names or initialize is None:
            continue
        before = {name: module._buffers[name] for name in names}
        trials: list[dict[str, torch.Tensor]] = []
        try:
            for fill in (0, 1):
                for name, buffer in before.items():
                    assert buffer is not None, "chosen above"
                    module._buffers[name] = torch.full_like(buffer, fill, device="cpu")
                with torch.no_grad(), torch.random.fork_rng(devices=[]):
                    initialize(module)
                trials.append({name: held.clone() for name in names if (held := module._buffers[name]) is not None})
        except (RuntimeError, NotImplementedError, AttributeError, TypeError, ValueError):
            continue  # it needs more than buffers: their values are not known here
        finally:
            module._buffers.update(before)
        for name in names:
            if torch.equal(*(trial[name] for trial in trials)):
                yield _join(path, name), trials[0][name]


def used_conversions(model: nn.Module, sources: Iterable[str]) -> list[Any]:
    """Those of transformers' conversions for `model` that concern the checkpoint names `sources`.

    `from_pretrained` notes them as it renames, and `save_pretrained` goes back through them: a prefix is put back, for
    instance, if it was there.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    found: list[Any] = get_model_conversion_mapping(model)  # type: ignore[arg-type]
    renamings = [entry for entry in found if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in found if isinstance(entry, WeightConverter)]
    for source in sources:
        rename_source_key(source, renamings, converters)  # notes in each conversion that it was used
    return [entry for entry in found if entry.was_used()]


def _join(path: str, leaf: str) -> str:
    return f"{path}.{leaf}" if path else leaf
