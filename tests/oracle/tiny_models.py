"""Tiny checkpoints of every kind that an installed transformers converts, with the tensors it loads from them.

    cd tests && python -m oracle.tiny_models --out DIR [--only KEY ...] [--dtype float32] [--max-shard-size 50GB]

For each key of its conversion registry: the class that the key applies to, with a small config, filled with noise of
its own for each tensor; then, in DIR/KEY (DIR/KEY@Class for the base model of a type),

    orig/     what `save_pretrained` writes: the published layout, but for prefixes
    full/     every registered rule reverted, prefixes too, where there are such rules
    runtime/  the state dict that `from_pretrained` makes of orig/

A key is written only if transformers itself reads it back: nothing missing or unexpected, and every tensor bit for bit.
Each key runs in a process of its own, so that a crash or a changed registry concerns no other; two runs give the same
bytes. A key whose folder exists is left as it is.
"""

from __future__ import annotations

import argparse
import os
import sys
import zlib
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from shutil import rmtree
from typing import Any
from warnings import simplefilter

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")  # forked processes keep to one thread

import torch
from oracle.tiny_classes import Skip, Sources, classes_for, registered_keys
from oracle.tiny_configs import build_config, tiny_config
from oracle.tiny_overrides import CONFIG_BUILDERS
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion

_MOST = 30_000_000  # parameters of a tiny model
_TIMEOUT = 120  # seconds a key


class NotReadBack(Exception):
    """transformers does not make of its own files what it saved."""


def write_key(sources: Sources, key: str, out: Path, dtype: torch.dtype, shard_size: str) -> list[str]:
    """Write all variants of a key; the folders that were made. Raises `Skip`, or whatever transformers raises."""
    made: list[str] = []
    for number, model_class in enumerate(classes_for(sources, key)):
        name = key if number == 0 else f"{key}@{model_class.__name__}"
        folder = out / name
        rmtree(folder, ignore_errors=True)
        try:
            if key == "MtpModel":
                _write_extra_layers(key, folder)
            else:
                _write_model(model_class, key, folder, dtype, shard_size)
        except ImportError as error:
            rmtree(folder, ignore_errors=True)
            raise Skip(f"an optional package is missing: {error}") from error
        made.append(name)
    return made


def _write_model(model_class: Any, key: str, folder: Path, dtype: torch.dtype, shard_size: str) -> None:
    torch.manual_seed(zlib.crc32(f"{key}/{model_class.__name__}".encode()))
    config = build_config(model_class, key)
    config.dtype = dtype
    model = model_class(config) if dtype == torch.float32 else model_class._from_config(config, dtype=dtype)
    model.eval()
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > _MOST:
        raise ValueError(f"{model_class.__name__}: {count} parameters are not tiny")
    model.tie_weights()
    fill_with_noise(model, key)
    wanted = _state_of(model)
    borrowed = type(config) is not model_class.config_class and key not in CONFIG_BUILDERS
    config_class = type(config) if borrowed else None

    model.save_pretrained(folder / "orig", max_shard_size=shard_size)
    read = _read_back(model_class, folder / "orig", dtype, config_class, wanted)
    rules: list[Any] = get_model_conversion_mapping(model, add_legacy=False)
    if any(isinstance(rule, PrefixChange) for rule in rules):
        model._weight_conversions = _all_at_once(rules)
        model.save_pretrained(folder / "full", max_shard_size=shard_size)
        try:
            _read_back(model_class, folder / "full", dtype, config_class, wanted)
        except NotReadBack:
            rmtree(folder / "full")
    (folder / "runtime").mkdir()
    save_file(read, folder / "runtime" / "model.safetensors")


def fill_with_noise(model: nn.Module, key: str) -> None:
    """Give every parameter and persistent float buffer values of its own, by `key` and its name; tied ones once."""
    seen: set[int] = set()
    with torch.no_grad():
        for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
            place = tensor.untyped_storage().data_ptr()
            if not tensor.is_floating_point() or place in seen:
                continue
            seen.add(place)
            generator = torch.Generator().manual_seed(zlib.crc32(f"{key}/{name}".encode()))
            noise = torch.rand(tensor.shape, generator=generator, dtype=torch.float32) + 0.25
            tensor.copy_(noise.to(tensor.dtype))


def _state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone().contiguous() for name, tensor in model.state_dict().items()}


def _read_back(
    model_class: Any, folder: Path, dtype: torch.dtype, config_class: Any, wanted: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The state dict that `from_pretrained` makes; raises `NotReadBack` if it is not `wanted`."""
    options = {} if config_class is None else {"config": config_class.from_pretrained(folder)}
    model, report = _load_with_report(model_class, folder, dtype=dtype, **options)
    for field in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[field]:
            raise NotReadBack(f"{field}: {', '.join(sorted(map(str, report[field])))[:200]}")
    found = _state_of(model)
    _compare(wanted, found)
    return found


def _load_with_report(model_class: Any, folder: Path, **options: Any) -> tuple[Any, dict[str, Any]]:
    """As `output_loading_info=True`, which the `from_pretrained` of some classes does not know."""
    reports: list[dict[str, Any]] = []
    finalize = PreTrainedModel.__dict__["_finalize_model_loading"]

    def finalize_and_keep(*args: Any) -> Any:
        report = finalize.__func__(*args)
        reports.append(report.to_dict())
        return report

    PreTrainedModel._finalize_model_loading = staticmethod(finalize_and_keep)  # type: ignore[assignment]
    try:
        return model_class.from_pretrained(folder, **options), reports[0]
    finally:
        PreTrainedModel._finalize_model_loading = finalize  # type: ignore[method-assign]


def _compare(wanted: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> None:
    wrong = [name for name in sorted({*wanted, *found}) if not _same(wanted.get(name), found.get(name))]
    if wrong:
        raise NotReadBack(f"{len(wrong)} tensors differ: {', '.join(wrong[:5])}")


def _same(wanted: torch.Tensor | None, found: torch.Tensor | None) -> bool:
    return wanted is not None and found is not None and wanted.dtype == found.dtype and torch.equal(wanted, found)


def _all_at_once(rules: Sequence[Any]) -> list[Any]:
    """The rules to revert: all, but a prefix rule once. On load an outer model's comes first and takes the prefix off,
    so that reverting an inner one as well would write a layout that no checkpoint has.
    """
    kept: list[Any] = []
    seen: list[tuple[tuple[str | None, str | None], str]] = []
    for rule in rules:
        if isinstance(rule, PrefixChange):
            scope = rule.scope_prefix or ""
            change = (rule.prefix_to_add, rule.prefix_to_remove)
            outer = any(change == one and (not at or f"{scope}.".startswith(f"{at}.")) for one, at in seen)
            if outer or rule.scope_prefix == "":
                continue
            seen.append((change, scope))
        kept.append(rule)
    return kept


def _write_extra_layers(key: str, folder: Path) -> None:
    """A model with a layer behind its last one: transformers makes a model of its own of that (`MtpModel`)."""
    from transformers import Glm4MoeForCausalLM
    from transformers.modeling_layers import MtpModel

    model_class: Any = Glm4MoeForCausalLM
    config = tiny_config(model_class.config_class, key)
    config.num_mtp_layers = 1
    torch.manual_seed(0)
    main = model_class(config).eval()
    fill_with_noise(main, key)
    extra: Any = MtpModel(main, 1)
    extra.eval()
    fill_with_noise(extra, f"{key}/mtp")
    fill_with_noise(main, key)  # embedding and head are shared, and keep the main model's values
    main.save_pretrained(folder / "orig")
    last = config.num_hidden_layers
    stored: dict[str, torch.Tensor] = {}
    block: dict[str, torch.Tensor] = {}
    for name, tensor in extra.state_dict().items():
        rest = name.removeprefix("layers.0.")
        if rest.startswith("mtp_block."):
            block[f"model.layers.1.{rest.removeprefix('mtp_block.')}"] = tensor
        elif rest != name:
            stored[f"model.layers.{last}.{rest.replace('post_norm.', 'shared_head.norm.')}"] = tensor
    for name, tensor in revert_weight_conversion(main, block).items():
        stored[name.replace("model.layers.1.", f"model.layers.{last}.")] = tensor
    path = folder / "orig" / "model.safetensors"
    copies = {name: tensor.clone().contiguous() for name, tensor in stored.items()}
    save_file({**load_file(path), **copies}, path, metadata={"format": "pt"})
    again = model_class.from_pretrained(folder / "orig")
    again.config.num_mtp_layers = 1
    again._keys_to_ignore_on_load_unexpected = {rf"model\.layers\.{last}.*"}
    wanted, found = (
        {name: tensor for name, tensor in _state_of(model).items() if name.startswith("layers.")}
        for model in (extra, MtpModel.from_pretrained(again))
    )
    _compare(wanted, found)
    (folder / "runtime").mkdir()
    save_file(found, folder / "runtime" / "model.safetensors")


def write_models(
    out: Path, only: Sequence[str] = (), dtype: str = "float32", shard_size: str = "50GB"
) -> dict[str, str]:
    """Write the keys whose folders are absent; for each that could not be written, why."""
    out.mkdir(parents=True, exist_ok=True)
    sources = Sources.read()
    faults: dict[str, str] = {}
    for key in only or registered_keys():
        if (out / key / "runtime").is_dir():
            continue
        reason = _write_apart(sources, key, out, getattr(torch, dtype), shard_size)
        if reason:
            faults[key] = reason
            print(f"{key}: {reason}", flush=True)
    return faults


def _write_apart(sources: Sources, key: str, out: Path, dtype: torch.dtype, shard_size: str) -> str:
    """`write_key` in a forked process; why it failed, empty if it did not."""
    context = get_context("fork")  # transformers is imported once; no thread runs yet that a fork would lose
    reader, writer = context.Pipe(duplex=False)
    child = context.Process(target=_write_and_tell, args=(writer, sources, key, out, dtype, shard_size))
    child.start()
    writer.close()
    try:
        reason = str(reader.recv()) if reader.poll(_TIMEOUT) else f"not done in {_TIMEOUT} s"
    except EOFError:
        reason = "its process died"
    child.kill()
    child.join()
    return reason


def _write_and_tell(
    writer: Connection, sources: Sources, key: str, out: Path, dtype: torch.dtype, shard_size: str
) -> None:
    simplefilter("ignore")
    try:
        write_key(sources, key, out, dtype, shard_size)
    except Exception as error:  # noqa: BLE001 - whatever transformers raises is why this key has no files
        writer.send(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    else:
        writer.send("")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write all keys; 1 if one failed that need not be skipped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder that gets one sub-folder a key")
    parser.add_argument("--only", nargs="*", default=(), help="registry keys (default: all)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--max-shard-size", default="50GB")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    faults = write_models(options.out, options.only, options.dtype, options.max_shard_size)
    return int(any(not reason.startswith("Skip: ") for reason in faults.values()))


if __name__ == "__main__":
    sys.exit(main())
