"""Which model classes the keys of transformers' conversion registry apply to, found in its sources."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from inspect import getmembers, isclass
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedModel, conversion_mapping
from transformers.models.auto import modeling_auto

_ROOT = Path(transformers.__file__).parent
_HEADS = (  # the tables of heads, the widest first
    "CAUSAL_LM",
    "IMAGE_TEXT_TO_TEXT",
    "MULTIMODAL_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "OBJECT_DETECTION",
    "INSTANCE_SEGMENTATION",
    "SEMANTIC_SEGMENTATION",
    "DEPTH_ESTIMATION",
    "MASKED_LM",
    "PRETRAINING",
    "RETRIEVAL",
    "MASK_GENERATION",
    "TEXT_TO_WAVEFORM",
    "DECISION",
    "TIME_SERIES_PREDICTION",
)


class Skip(Exception):
    """A key that cannot be tried: it names nothing, or needs a package that is not installed."""


def registered_keys() -> list[str]:
    """All keys of the registry, in its order."""
    conversion_mapping.get_checkpoint_conversion_mapping("llava")  # type: ignore[no-untyped-call]  # fills it
    return list(conversion_mapping._checkpoint_conversion_mapping_cache or ())


@dataclass(frozen=True, slots=True)
class Sources:
    """Where transformers defines what."""

    modules: dict[str, list[str]]  # class name -> modules
    folders: dict[str, list[str]]  # model type -> folders of `models`

    @classmethod
    def read(cls) -> Sources:
        """By a look at every modeling and configuration file."""
        modules: dict[str, list[str]] = defaultdict(list)
        folders: dict[str, list[str]] = defaultdict(list)
        for path in (*sorted(_ROOT.glob("models/*/modeling_*.py")), _ROOT / "modeling_layers.py"):
            for name in re.findall(r"^class (\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE):
                modules[name].append(_module_of(path))
        pattern = re.compile(r"^\s+model_type(?:\s*:\s*[\w\[\]]+)?\s*=\s*[\"']([^\"']+)[\"']", re.MULTILINE)
        for path in sorted(_ROOT.glob("models/*/configuration_*.py")):
            for name in pattern.findall(path.read_text(encoding="utf-8")):
                folders[name].append(path.parent.name)
        return cls(modules, folders)


def classes_for(sources: Sources, key: str) -> list[Any]:
    """The classes to try for a key: the widest, then the base model if the key is a type. Raises `Skip`."""
    if key in sources.modules:
        found = _find(sources, key)
        if found is None:
            raise Skip(f"class {key} exists but is not a PreTrainedModel")
        return [found]
    if key == "legacy":
        raise Skip("internal list, appended to every model's rules")
    if key not in sources.folders:
        raise Skip("dead key: neither a class name nor a model type of this version")
    named = [found for name in dict.fromkeys(_auto_names(key)) if (found := _find(sources, name)) is not None]
    classes = [found for found in named if _type_of(found) == key] or _defined_for(sources, key) or named
    if not classes:
        raise Skip("no model class uses this type")
    base = next((found for found in classes[1:] if found.__name__.endswith("Model")), None)
    return classes[:1] if base is None else [classes[0], base]


def _module_of(path: Path) -> str:
    return ".".join(("transformers", *path.relative_to(_ROOT).with_suffix("").parts))


def _type_of(model_class: Any) -> str | None:
    return getattr(model_class.config_class, "model_type", None)


def _find(sources: Sources, name: str) -> Any:
    for module in sources.modules.get(name, ()):
        found = getattr(import_module(module), name, None)
        if isclass(found) and issubclass(found, PreTrainedModel):
            return found
    return None


def _auto_names(key: str) -> Iterator[str]:
    """Class names that the auto classes have for a type: heads, then the base model."""
    tables = [getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES", {}) for head in _HEADS]
    for table in (*tables, modeling_auto.MODEL_MAPPING_NAMES):
        named: Any = table.get(key)
        if named:
            yield named if isinstance(named, str) else named[0]


def _defined_for(sources: Sources, key: str) -> list[Any]:
    """Classes whose config has this type, in the type's folders; those with a head that generates come first."""
    paths = [path for folder in dict.fromkeys(sources.folders[key]) for path in _modeling_files(folder)]
    found = [
        member
        for path in paths
        for _, member in getmembers(import_module(_module_of(path)), isclass)
        if issubclass(member, PreTrainedModel)
        and member.__module__ == _module_of(path)
        and _type_of(member) == key
        and not member.__name__.endswith("PreTrainedModel")
    ]
    generates = ("ForConditionalGeneration", "ForCausalLM")
    return sorted(found, key=lambda kind: (not kind.__name__.endswith(generates), "For" not in kind.__name__))


def _modeling_files(folder: str) -> list[Path]:
    return sorted((_ROOT / "models" / folder).glob("modeling_*.py"))
