"""The signature: what the running model wants, by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from loadplan.cache.digest import digest_json
from loadplan.cache.error import LoadplanError
from loadplan.compiler.patterns import PatternError
from loadplan.compiler.recipe import parse_dtype
from loadplan.runtime.plan import Constant, FusedModule, ModelRecord
from loadplan.runtime.tensor_type import TensorType

if TYPE_CHECKING:
    from torch import nn


class SignatureError(LoadplanError, ValueError):
    """A signature cannot be made, or its parts contradict each other."""


class UnknownArchitecture(SignatureError):
    """No installed library knows the model class that a config names."""


@dataclass(frozen=True, slots=True)
class Submodel:
    """A model inside the model, itself included: rules of its class or type concern the names below its path."""

    path: str  # of the module; empty for the whole model
    class_name: str
    model_type: str
    is_custom: bool = False  # a class from elsewhere, under a type that may be another's: only registered rules are its


@dataclass(frozen=True, slots=True)
class Signature:
    """Names, shapes and dtypes of a model's state dict, its ties, and the buffers that are not in it."""

    tensors: tuple[tuple[str, TensorType], ...]  # parameters and persistent buffers, in the model's order
    ties: tuple[tuple[str, ...], ...] = ()  # groups of names that are one tensor
    computed_buffers: tuple[str, ...] = ()  # non-persistent: the model makes them, no checkpoint should
    constants: tuple[Constant, ...] = ()  # the values of those of them that are known without running the model
    base_model_prefix: str = ""  # whole components that a checkpoint of the inner or outer model lacks or has
    model_class: str = ""  # name, for messages and for whoever builds the model
    submodels: tuple[Submodel, ...] = ()  # those of transformers, outer ones first
    model: ModelRecord | None = None  # what builds the model again, where its class is a library's
    fusions: tuple[FusedModule, ...] = ()  # modules that are built as fused ones
    fused: Signature | None = None  # of the model with these; None when there are none
    remade: tuple[str, ...] = ()  # of a fused model: tensors that are not those of the original, whatever their names

    @classmethod
    def of(cls, tensors: Mapping[str, object], ties: Iterable[Iterable[str]] = ()) -> Signature:
        """From name -> (shape, dtype), or name -> anything with `shape` and `dtype`; dtypes as torch's or `"BF16"`.

        Raises:
            SignatureError: an item is neither.
        """
        return cls(tuple((name, _type(name, value)) for name, value in tensors.items()), tuple(map(tuple, ties)))

    @classmethod
    def from_module(cls, module: nn.Module, fusion_config: Mapping[str, object] | None = None) -> Signature:
        """From a module, best built under `torch.device("meta")`; names that share a tensor are tied.

        `fusion_config` says what is fused (`loadplan.runtime.fusion`); None is the module's `config.fusion_config`. The
        module stays as it is.

        Raises:
            FusionError: the fusions are unknown, in conflict, or find nothing to fuse.
        """
        from loadplan.compiler.read_signature import read_module

        return read_module(module, fusion_config)

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, object],
        dtype: object | None = None,
        fusion_config: Mapping[str, object] | None = None,
    ) -> Signature:
        """From a config.json through transformers, which must be installed and know the architecture.

        `fusion_config` says what is fused; None is the config's own.

        Raises:
            UnknownArchitecture: it is not, or does not.
            SignatureError: it does, and cannot build the class from this config.
            FusionError: the fusions are unknown, in conflict, or find nothing to fuse.
        """
        from loadplan.compiler.read_signature import read_config

        return read_config(config, dtype, fusion_config)

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the value."""
        return digest_json(self.to_json())

    def to_json(self) -> dict[str, object]:
        """The value as JSON."""
        return {
            "tensors": [[name, list(kind.shape), str(kind.dtype)] for name, kind in self.tensors],
            "ties": [list(names) for names in self.ties],
            "computed_buffers": list(self.computed_buffers),
            "constants": [[c.name, list(c.type.shape), str(c.type.dtype), c.data.hex()] for c in self.constants],
            "base_model_prefix": self.base_model_prefix,
            "model_class": self.model_class,
            "submodels": [
                [model.path, model.class_name, model.model_type, model.is_custom] for model in self.submodels
            ],
            "model": None if self.model is None else [*_record_texts(self.model)],
            "fusions": [[one.path, one.family, one.options] for one in self.fusions],
            "fused": None if self.fused is None else self.fused.to_json(),
            "remade": list(self.remade),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> Signature:
        """The inverse of `to_json`. Raises `SignatureError` on anything else."""
        try:
            parts = data["tensors"], data["ties"], data["computed_buffers"], data["constants"], data["submodels"]
            if not all(isinstance(part, list) for part in parts):
                raise TypeError("not lists")
            tensors, ties, buffers, constants, submodels = (list[Any](part) for part in parts if isinstance(part, list))
            return cls(
                tuple((str(name), _type(name, (shape, dtype))) for name, shape, dtype in tensors),
                tuple(tuple(map(str, names)) for names in ties),
                tuple(map(str, buffers)),
                tuple(
                    Constant(str(name), _type(name, (shape, dtype)), bytes.fromhex(data))
                    for name, shape, dtype, data in constants
                ),
                str(data["base_model_prefix"]),
                str(data["model_class"]),
                tuple(
                    Submodel(str(path), str(name), str(kind), bool(custom)) for path, name, kind, custom in submodels
                ),
                _read_record(data.get("model")),
                _read_fusions(data["fusions"]),
                None if data["fused"] is None else _read_fused(data["fused"]),
                _read_names(data["remade"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise SignatureError(f"not a stored signature: {error}") from error


def _record_texts(record: ModelRecord) -> tuple[str, str, str, str, str]:
    config, generation = (data.decode() for data in (record.config, record.generation_config))
    return record.library, record.class_name, record.dtype, config, generation


def _read_record(value: object) -> ModelRecord | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 5:
        raise TypeError("not a model")
    library, class_name, dtype, config, generation = map(str, value)
    return ModelRecord(library, class_name, dtype, config.encode(), generation.encode())


def _read_fusions(value: object) -> tuple[FusedModule, ...]:
    if not isinstance(value, list):
        raise TypeError("not fusions")
    return tuple(FusedModule(str(path), str(family), str(options)) for path, family, options in value)


def _read_names(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise TypeError("not names")
    return tuple(map(str, value))


def _read_fused(value: object) -> Signature:
    if not isinstance(value, dict) or value.get("fused") is not None:
        raise TypeError("not the signature of a fused model")
    return Signature.from_json(value)


def _type(name: str, value: object) -> TensorType:
    pair = value if isinstance(value, tuple | list) else (getattr(value, "shape", None), getattr(value, "dtype", None))
    if isinstance(value, TensorType):
        return value
    try:
        shape, dtype = pair
        sizes = tuple(int(size) for size in shape)
        if min(sizes, default=0) < 0:
            raise ValueError("negative size")
        return TensorType(sizes, parse_dtype(dtype))
    except (TypeError, ValueError, PatternError) as error:
        raise SignatureError(f"signature of {name!r}: {value!r} is not (shape, dtype): {error}") from error
