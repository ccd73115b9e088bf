"""What `from_pretrained` leaves in a transformers model besides its tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, overload
from weakref import ref

from torch import nn

from loadplan.runtime.artifact import Artifact
from loadplan.runtime.build_model import used_conversions
from loadplan.runtime.open_plan import Plan
from loadplan.runtime.plan import ModelRecord
from loadplan.runtime.save import SaveError, save_checkpoint


def is_pretrained(model: nn.Module) -> bool:
    """Whether any part of it is a model of transformers."""
    return any(hasattr(module, "_init_weights") for module in model.modules())


def mark_initialized(model: nn.Module) -> None:
    """Mark all modules as loaded: transformers would fill them with random numbers when they join a larger model."""
    for module in model.modules():
        module._is_hf_initialized = True  # type: ignore[assignment]


def forget_ties(model: nn.Module, untied: Collection[frozenset[str]]) -> None:
    """Take names that should be tied, and have different tensors in the checkpoint, out of the model's list of ties."""
    ties: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    for name, other in list(ties.items()):
        if frozenset((name, other)) in untied:
            del ties[name]


def finish_model(model: nn.Module, record: ModelRecord, location: str, sources: Callable[[], Iterable[str]]) -> None:
    """Give `model`, built from `record`, its name, its generation config, and what saving it asks for.

    Args:
        model: the model; its tensors are not looked at.
        record: what it was built from.
        location: its name or path, as it was given.
        sources: gives the names of the checkpoint's tensors.
    """
    pretrained: Any = model
    pretrained.config.name_or_path = location
    pretrained.name_or_path = location
    pretrained._weight_conversions = UsedConversions(model, sources)
    pretrained._use_kernels = False
    if pretrained.can_generate() and hasattr(model, "adjust_generation_fn"):
        _read_generation_config(pretrained, record)


def _read_generation_config(model: Any, record: ModelRecord) -> None:
    """Have the model read its generation config as `from_pretrained` does; some classes have ways of their own."""
    with TemporaryDirectory(prefix="loadplan-") as folder:
        Path(folder, "config.json").write_bytes(record.config)
        if record.generation_config:
            Path(folder, "generation_config.json").write_bytes(record.generation_config)
        model.adjust_generation_fn(
            generation_config=None,
            from_auto_class=False,
            from_pipeline=None,
            pretrained_model_name_or_path=folder,
            cache_dir=None,
            force_download=False,
            proxies=None,
            local_files_only=True,
            token=None,
            revision=None,
            subfolder="",
            trust_remote_code=False,
        )


class UsedConversions(Sequence[Any]):
    """The conversions by which transformers would have loaded a model, found out when they are asked for.

    That is when the model is saved in the checkpoint's layout; to find out takes as long as transformers takes to route
    all names. Copies and pickles of the model have the plain list.
    """

    def __init__(self, model: nn.Module, sources: Callable[[], Iterable[str]]) -> None:
        self._model, self._sources = ref(model), sources
        self._found: list[Any] | None = None

    def _list(self) -> list[Any]:
        if self._found is None:
            model = self._model()
            assert model is not None, "asked for by the model itself"
            self._found = used_conversions(model, self._sources())
        return self._found

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self._list()[index]

    def __len__(self) -> int:
        return len(self._list())

    def __iter__(self) -> Iterator[Any]:
        return iter(self._list())

    def __reduce__(self) -> tuple[object, ...]:
        return list, (self._list(),)


class SaveFused:
    """`save_pretrained` of a model with fused modules, whose names and layout transformers does not know.

    Tensors go back through the plan into the files of the checkpoint; configs are written by transformers, as they are
    now. Part of the model: copies and pickles have their own.
    """

    def __init__(self, model: nn.Module, plan: Plan | Artifact) -> None:
        self._model, self._plan = model, plan

    def __call__(
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        save_original_format: bool = True,
        **others: object,
    ) -> None:
        """Write the model to `save_directory`; with `save_original_format` False under its fused names.

        Raises:
            SaveError: another option of `save_pretrained` is given, or what `save_checkpoint` raises.
        """
        if others:
            raise SaveError(
                f"a model with fused modules is saved by its plan, which has no {', '.join(sorted(others))}"
            )
        if not is_main_process:
            return
        model: Any = self._model
        save_checkpoint(model, self._plan, save_directory, original_format=save_original_format)
        model.config.dtype = str(model.dtype).removeprefix("torch.")
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(save_directory)
        if model.can_generate():
            model.generation_config.save_pretrained(save_directory)
