"""Published key sets as sparse twins: files with complete headers and holes for data, compiled.

`cd tests && python -m corpus.twins` compiles all key sets (or those that are named) and prints the messages;
`--table` prints the table in README.md beside this file, `--write` puts it there.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from builders import BITS
from corpus.key_sets import KEY_SETS, KeySet
from corpus.shapes import Table, collapse, find_shape

from loadplan.compiler import compile_plan
from loadplan.compiler.problem import CompileError
from loadplan.compiler.recipe import Recipe
from loadplan.compiler.registry import find_recipe, parse_config
from loadplan.runtime import Plan

HERE = Path(__file__).parent
DATA = HERE.parent / "data"
MARK = "<!-- made by `python -m corpus.twins --write` -->\n"
Stored = tuple[str, tuple[int, ...]]  # dtype, shape


@dataclass(frozen=True)
class Twin:
    """A checkpoint on disk whose data is one hole."""

    location: Path  # what the compiler is given
    names: tuple[str, ...]  # of its tensors, as the index lists them
    data_nbytes: int
    total_size: float | None  # as published


def make_twin(key_set: KeySet, folder: Path, *, cured: bool = False) -> Twin:
    """Write the files of `key_set`; `cured`: with what its cure changes in them."""
    folder.mkdir(parents=True, exist_ok=True)
    cure = key_set.cure if cured else None
    instead = {} if cure and cure.published else key_set.instead
    source = key_set.folder or key_set.name
    config: dict[str, object] | None = None
    if key_set.stock_config is not None:
        config = dict(key_set.stock_config)
    elif key_set.has_config:
        config = json.loads(read_text(source, "config.json"))
    if config is not None and key_set.has_config:
        text = read_text(source, instead["config.json"]) if "config.json" in instead else None
        (folder / "config.json").write_text(text or json.dumps({**config, **(cure.config if cure else {})}))
    if key_set.facts is None:
        return _from_header(folder, read_text(source, key_set.file), key_set.file.replace(".header.json", ""))
    twins: list[Twin] = []
    table = key_set.facts(config or {})
    for name in (key_set.file, *key_set.also):
        raw = read_text(source, name)
        index = json.loads(raw)
        types = stored_types(index["weight_map"], table, key_set.dtype)
        write_shards(folder, index["weight_map"], types)
        (folder / name).write_text(read_text(source, instead[name]) if name in instead else raw)
        data_nbytes = sum(map(nbytes, types.values()))
        twins.append(Twin(folder, tuple(types), data_nbytes, index.get("metadata", {}).get("total_size")))
    return replace(twins[0], location=folder / key_set.opened)


def _from_header(folder: Path, header: str, stem: str) -> Twin:
    """A file with a published header, as it is."""
    entries = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
    end = max(entry["data_offsets"][1] for entry in entries.values())
    path = folder / (stem if stem.endswith(".safetensors") else f"{stem}.safetensors")
    write_header(path, header, end)
    return Twin(folder, tuple(entries), end, None)


def read_text(folder: str, file: str) -> str:
    """A published file, from the corpus or from beside it."""
    places = [DATA / "corpus" / folder / f"{file}.gz", DATA / "corpus" / folder / file, DATA / folder / file]
    found = next(path for path in places if path.is_file())
    raw = found.read_bytes()
    return (gzip.decompress(raw) if found.suffix == ".gz" else raw).decode("utf-8")


def stored_types(weight_map: Mapping[str, str], table: Table, dtype: str) -> dict[str, Stored]:
    """What the checkpoint holds, by name; `dtype` is that of all tensors of which the table says no other."""
    found: dict[str, Stored] = {}
    for name in weight_map:
        shape = find_shape(name, table)
        own = shape[0] if shape and isinstance(shape[0], str) else None
        found[name] = (str(own or dtype), tuple(size for size in shape if isinstance(size, int)))
    return found


def nbytes(stored: Stored) -> int:
    """Bytes of a tensor's data."""
    dtype, shape = stored
    return math.prod(shape) * BITS[dtype] // 8


def write_shards(folder: Path, weight_map: Mapping[str, str], types: Mapping[str, Stored]) -> None:
    """The files that an index names, each with its tensors in the order of the index."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: dict[str, dict[str, Stored]] = {}
    for name, file in weight_map.items():
        shards.setdefault(file, {})[name] = types[name]
    for file, tensors in shards.items():
        if file.endswith(".bin"):
            _write_torch(folder / file, tensors)
        else:
            _write_safetensors(folder / file, tensors)


def _write_safetensors(path: Path, tensors: Mapping[str, Stored]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, stored in tensors.items():
        begin, end = end, end + nbytes(stored)
        header[name] = {"dtype": stored[0], "shape": stored[1], "data_offsets": [begin, end]}
    write_header(path, json.dumps(header, separators=(",", ":")), end)


def write_header(path: Path, header: str, data_nbytes: int) -> None:
    """A safetensors file with this header, and a hole of `data_nbytes`."""
    raw = header.encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + data_nbytes)


_TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "BOOL": torch.bool}


def _write_torch(path: Path, tensors: Mapping[str, Stored]) -> None:
    """What `torch.save` writes, without data: the tensors are views of a hole, and torch leaves another one for them."""
    hole = path.with_name("hole")
    with hole.open("wb") as file:
        file.truncate(max(map(nbytes, tensors.values())))
    empty = {
        name: torch.from_file(str(hole), shared=True, size=math.prod(shape), dtype=_TORCH[dtype]).view(shape)
        for name, (dtype, shape) in tensors.items()
    }
    with torch.serialization.skip_data():
        torch.save(empty, path)
    hole.unlink()


def compile_twin(key_set: KeySet, twin: Twin, *, cured: bool = False) -> Plan:
    """The plan of one rank, made as a user would; `cured`: as its message says. Raises `CompileError`."""
    cure = key_set.cure if cured else None
    if cure is None:
        return compile_plan(twin.location)
    recipe: Recipe | None = None
    if cure.waivers:
        config = json.loads((twin.location / "config.json").read_text())
        found = find_recipe(cure.recipe, config=parse_config(config))
        assert found is not None
        recipe = replace(found, may_be_unused=(*found.may_be_unused, *cure.waivers))
    return compile_plan(twin.location, recipe, signature="recipe" if cure.as_recipe else None)


def told(result: Plan | CompileError) -> str:
    """What a user reads, on one line, without versions of libraries."""
    if isinstance(result, CompileError):
        lines = [line.strip() for line in str(result).splitlines()]
        more = len(lines) - 1 - _SHOWN
        text = "; ".join((*lines[1 : 1 + _SHOWN], *((f"and {more} lines more",) if more > 0 else ())))
    else:
        text = "; ".join(_reported(result))
    return re.sub(r"(transformers) \d[\w.]*", r"\1", text)


_SHOWN = 3


def _reported(plan: Plan) -> Iterator[str]:
    report, head = plan.report, plan.head
    yield f"{report.targets} targets"
    if report.unused:
        yield f"not loaded: {_patterns(report.unused)}"
    for other, name in head.aliases:
        yield f"tied: {other} = {name}"
    for names in head.equal_ties:
        yield f"tied if equal: {' = '.join(names)}"
    if report.casts:
        yield f"cast: {_patterns(report.casts)}"
    yield from report.notes[:_SHOWN]
    if len(report.notes) > _SHOWN:
        yield f"and {len(report.notes) - _SHOWN} notes more"


def _patterns(names: Iterable[str]) -> str:
    return ", ".join(
        f"{name} ({count})" if count > 1 else name for name, count in Counter(map(collapse, names)).items()
    )


def row(key_set: KeySet, result: Plan | CompileError, count: int) -> str:
    """A line of the table; `count` is the number of tensors in the checkpoint."""
    verdict = f"refused: {', '.join(sorted(key_set.kinds))}" if isinstance(result, CompileError) else "compiles"
    cure = f"; then it compiles: {_cure(key_set)}" if key_set.cure else ""
    cells = (key_set.name, key_set.model, str(count), verdict, key_set.why + cure, told(result))
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _cure(key_set: KeySet) -> str:
    cure = key_set.cure
    assert cure is not None
    if cure.as_recipe:
        return "`signature='recipe'`"
    if cure.waivers:
        return f"`may_be_unused={cure.waivers!r}`"
    if cure.config:
        return ", ".join(f"`{name}` {json.dumps(value)}" for name, value in cure.config.items())
    return "with the file as it was published before"


HEAD = "| name | model | keys | verdict | why | what the user is told |\n|---|---|---|---|---|---|\n"


def table(rows: Iterable[str]) -> str:
    """The table of README.md."""
    return HEAD + "".join(f"{line}\n" for line in rows)


def main() -> None:
    """Print, or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="key sets; all if none is named")
    parser.add_argument("--table", action="store_true", help="print the table")
    parser.add_argument("--write", action="store_true", help="put the table into README.md")
    options = parser.parse_args()
    rows: list[str] = []
    for key_set in KEY_SETS:
        if options.names and key_set.name not in options.names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            twin = make_twin(key_set, Path(folder))
            try:
                result: Plan | CompileError = compile_twin(key_set, twin)
            except CompileError as error:
                result = error
        rows.append(row(key_set, result, len(twin.names)))
        if not (options.table or options.write):
            message = str(result) if isinstance(result, CompileError) else told(result)
            print(f"{key_set.name}: {message}\n")
    if options.table:
        print(table(rows), end="")
    if options.write:
        readme = HERE / "README.md"
        front, _, _ = readme.read_text().partition(MARK)
        readme.write_text(f"{front}{MARK}\n{table(rows)}")


if __name__ == "__main__":
    main()
