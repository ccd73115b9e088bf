"""Equal inputs, equal bytes: plans from processes that differ in all that should not count, and digests of recipes.

Recipes are written as source text, so that comments and the order of definitions differ and the values do not.
"""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import zstandard
from builders import TINY_DECODER, raw, save_tiny, write_file

from loadplan.compiler import Target, compile_plan, read_checkpoint
from loadplan.recipes import PatternError, Recipe
from loadplan.runtime import Plan

_COMPILE = """
import sys
from loadplan.compiler import Target, compile_plan
checkpoint, plan = sys.argv[1:]
compiled = compile_plan(checkpoint, target=Target(dtype="bfloat16", tp_size=2))
compiled.save(plan)
print(compiled.digest)
"""


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Mixtral in several files."""
    config = {**TINY_DECODER, "num_local_experts": 12}
    folder = save_tiny(
        tmp_path_factory.mktemp("mixtral"), "MixtralForCausalLM", config, "float32", max_shard_size="40KB"
    )
    assert len(list(folder.glob("*.safetensors"))) > 3
    return folder


def test_plans_from_different_places_and_processes_are_the_same_bytes(mixtral: Path, tmp_path: Path) -> None:
    found: dict[bytes, set[str]] = {}
    for seed in range(2):
        place = tmp_path / f"place {seed}" / ("deep/" * seed) / "checkpoint"
        place.mkdir(parents=True)
        for path in sorted(mixtral.iterdir(), reverse=bool(seed)):  # some file systems list them in this order
            shutil.copy(path, place / path.name)
            os.utime(place / path.name, (seed, seed))
        cwd = tmp_path / f"cwd {seed}"
        cwd.mkdir()
        plan = cwd / "a.loadplan"
        checkpoint = place if seed else os.path.relpath(place, cwd)
        command = [sys.executable, "-c", _COMPILE, checkpoint, plan]
        environment = {**os.environ, "PYTHONHASHSEED": str(seed + 1), "HOME": str(cwd), "TZ": f"UTC+{seed}"}
        output = subprocess.run(command, cwd=cwd, env=environment, check=True, capture_output=True, text=True).stdout
        found.setdefault(plan.read_bytes(), set()).add(output.strip())
    here = compile_plan(mixtral, target=Target(dtype="bfloat16", tp_size=2))
    assert found == {here.to_bytes(): {here.digest}}


def test_a_plan_holds_no_path_of_its_machine(mixtral: Path, tmp_path: Path) -> None:
    plan = compile_plan(mixtral, target=Target(tp_size=2))
    plan.save(tmp_path / "a.loadplan")
    texts = [plan.to_bytes(), *frames(plan.to_bytes())]
    assert b"model.layers.1.mlp.experts.down_proj" in texts[1]  # the frames are readable as they are
    for place in (mixtral, Path.cwd(), Path.home(), Path(sys.prefix), Path(__file__).parent):
        assert len(place.parts) > 1
        assert not any(str(place).encode() in text for text in texts), place
    assert not any(Path(file.name).is_absolute() for file in plan.head.files)
    assert Plan.open(tmp_path / "a.loadplan").digest == plan.digest


def frames(data: bytes) -> Iterator[bytes]:
    """The frames of a plan file, found by the mark that zstd puts at the start of each (RFC 8878, 3.1.1)."""
    starts = [at for at in range(len(data)) if data.startswith(b"\x28\xb5\x2f\xfd", at)]
    for start in starts:
        yield zstandard.ZstdDecompressor().decompressobj().decompress(data[start:])


def test_the_order_of_entries_in_memory_does_not_count(mixtral: Path) -> None:
    checkpoint = read_checkpoint(mixtral)
    wanted = compile_plan(checkpoint, target=Target(tp_size=2))
    names = list(checkpoint.entries)
    for seed in range(3):
        random.Random(seed).shuffle(names)
        shuffled = replace(checkpoint, entries={name: checkpoint.entries[name] for name in names})
        assert compile_plan(shuffled, target=Target(tp_size=2)).to_bytes() == wanted.to_bytes()


def test_each_input_counts(mixtral: Path, tmp_path: Path) -> None:
    rewritten = tmp_path / "rewritten"
    shutil.copytree(mixtral, rewritten)
    file = next(iter(sorted(rewritten.glob("*.safetensors"))))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    same = compile_plan(mixtral)
    assert compile_plan(rewritten).digest == same.digest  # data does not count: a plan is for all of its kind
    plans = {
        "as it is": same,
        "ranks": compile_plan(mixtral, target=Target(tp_size=2)),
        "dtype": compile_plan(mixtral, target=Target(dtype="bfloat16")),
        "no signature": compile_plan(mixtral, signature="recipe"),
        "policy": compile_plan(mixtral, target=Target(missing="ignore")),
    }
    renamed = tmp_path / "renamed"
    shutil.copytree(mixtral, renamed)
    config = (renamed / "config.json").read_text()
    (renamed / "config.json").write_text(config.replace('"rms_norm_eps": 1e-05', '"rms_norm_eps": 1e-06'))
    plans["config"] = compile_plan(renamed)
    assert len({plan.digest for plan in plans.values()}) == len(plans)


# Recipes as source text.

HEADER = """
from loadplan.compiler.ops import Chunk, Concatenate, MergeModulelist, Transpose
from loadplan.recipes import *
"""
PLAIN = """
RECIPE = Recipe(
    rules=[
        WeightRenaming("gamma$", "weight"),
        WeightConverter(["e.*.w1", "e.*.w3"], "e.gate_up", [MergeModulelist(0), Concatenate(1)]),
    ],
    tp_plan={"layers.*.q": "colwise", "layers.*.o": "rowwise", "layers.0.q": Shard(-1, unit=4)},
    dtype_plan={"norm": "float32", "norm.bias": "bfloat16"},
    may_be_missing=["bias"],
    may_be_unused=["inv_freq"],
)
"""
SAME = {
    "comments and blank lines": PLAIN.replace("\n", "  # why\n\n"),
    "order of keywords": """
RECIPE = Recipe(
    may_be_unused=["inv_freq"], may_be_missing=["bias"],
    dtype_plan={"norm": "float32", "norm.bias": "bfloat16"},
    tp_plan={"layers.*.q": "colwise", "layers.*.o": "rowwise", "layers.0.q": Shard(-1, unit=4)},
    rules=[
        WeightRenaming("gamma$", "weight"),
        WeightConverter(["e.*.w1", "e.*.w3"], "e.gate_up", [MergeModulelist(0), Concatenate(1)]),
    ],
)
""",
    "order of dicts": PLAIN.replace(
        '{"layers.*.q": "colwise", "layers.*.o": "rowwise", "layers.0.q": Shard(-1, unit=4)}',
        '{"layers.*.o": "rowwise", "layers.0.q": Shard(-1, unit=4), "layers.*.q": "colwise"}',
    ).replace('{"norm": "float32", "norm.bias": "bfloat16"}', '{"norm.bias": "bfloat16", "norm": "float32"}'),
    "order of definitions": """
UNUSED = ("inv_freq",)
STACK = WeightConverter(("e.*.w1", "e.*.w3"), ("e.gate_up",), (MergeModulelist(), Concatenate(dim=1)))
RULES = (WeightRenaming(source_patterns="gamma$", target_patterns="weight"), STACK)
def make():
    dtypes = dict(norm="F32")
    dtypes["norm.bias"] = "torch.bfloat16"
    plan = {"layers.0.q": Shard(unit=4, dim=-1)}
    plan.update({f"layers.*.{name}": style for name, style in zip("qo", ("colwise", "rowwise"))})
    return Recipe(RULES, plan, dtypes, may_be_missing=("bias",), may_be_unused=UNUSED)
RECIPE = make()
""",
    "quotes": PLAIN.replace('"', "'"),
    "names of values": PLAIN.replace('"colwise"', "Shard(-2, one_dim=True)").replace('"float32"', '"F32"'),
}
CHANGED = {  # a field, and the text to put in another's place
    "pattern of a renaming": ('"gamma$"', '"gamma"'),
    "target of a renaming": ('"weight"', '"weights"'),
    "kind of a rule": ('WeightRenaming("gamma$", "weight")', 'GroupWeightRename(["gamma$"], ["weight"])'),
    "order of sources": ('["e.*.w1", "e.*.w3"]', '["e.*.w3", "e.*.w1"]'),
    "target of a converter": ('"e.gate_up"', '"e.gate_up_proj"'),
    "parameter of an operation": ("Concatenate(1)", "Concatenate(0)"),
    "order of operations": ("MergeModulelist(0), Concatenate(1)", "Concatenate(1), MergeModulelist(0)"),
    "another operation": ("Concatenate(1)]", "Concatenate(1), Transpose()]"),
    "style": ('"layers.*.q": "colwise"', '"layers.*.q": "packed_colwise"'),
    "pattern of the parallel plan": ('"layers.*.q": "colwise"', '"layers.*.k": "colwise"'),
    "field of a shard": ("unit=4", "unit=8"),
    "dtype": ('"norm": "float32"', '"norm": "float64"'),
    "pattern of the dtype plan": ('"norm.bias"', '"norm.scale"'),
    "waiver of a target": ('may_be_missing=["bias"]', 'may_be_missing=["bias", "scale"]'),
    "waiver of a source": ('may_be_unused=["inv_freq"]', "may_be_unused=[]"),
    "waivers exchanged": (
        'may_be_missing=["bias"],\n    may_be_unused=["inv_freq"]',
        'may_be_missing=["inv_freq"],\n    may_be_unused=["bias"]',
    ),
    "one more rule": ("rules=[", 'rules=[WeightRenaming("x", "y"),'),
}


def recipe_of(text: str) -> Recipe:
    """The `RECIPE` that the source text makes."""
    namespace: dict[str, object] = {}
    exec(compile(HEADER + text, "recipe.py", "exec"), namespace)  # noqa: S102 - the text is above
    recipe = namespace["RECIPE"]
    assert isinstance(recipe, Recipe)
    return recipe


@pytest.mark.parametrize("text", SAME.values(), ids=SAME)
def test_how_a_recipe_is_written_down_does_not_count(text: str) -> None:
    assert text != PLAIN
    assert recipe_of(text).digest == recipe_of(PLAIN).digest
    assert recipe_of(text) == recipe_of(PLAIN)


def test_every_field_of_a_recipe_counts() -> None:
    digests = {"plain": recipe_of(PLAIN).digest}
    for what, (old, new) in CHANGED.items():
        assert PLAIN.count(old) == 1, what
        digests[what] = recipe_of(PLAIN.replace(old, new)).digest
    assert len(set(digests.values())) == len(digests), digests


def test_the_order_of_rules_counts() -> None:
    rules = recipe_of(PLAIN).rules
    assert Recipe(rules=rules).digest != Recipe(rules=rules[::-1]).digest


def test_pairs_have_an_order_and_mappings_none() -> None:
    plan: dict[str, object] = {"norm": "F32", "norm.bias": "BF16"}
    assert Recipe(dtype_plan=plan).digest != Recipe(dtype_plan=list(plan.items())).digest
    assert Recipe(dtype_plan=list(plan.items())).digest != Recipe(dtype_plan=list(plan.items())[::-1]).digest


OPERATION = """
from dataclasses import dataclass
from typing import ClassVar
from loadplan.compiler.ops import Transpose
from loadplan.recipes import Recipe, WeightConverter

@dataclass(frozen=True)
class Twist:
    spread: ClassVar = "each"
    source: str = "a"
    factor: float = 0.5

    def bind(self, context, *args):
        return self

    def infer(self, *args):
        return Transpose(0, 1).infer(*args)

    def lower(self, *args):
        return Transpose(0, 1).lower(*args)

    def reverse(self, *args):
        return self

def recipe(*args):
    return Recipe(rules=[WeightConverter("w$", "w", [Twist(*args)])])
"""


def module_of(folder: Path, text: str) -> ModuleType:
    """A module with the source text, in a file of its own."""
    folder.mkdir()
    (folder / "twist.py").write_text(text)
    spec = importlib.util.spec_from_file_location("twist", folder / "twist.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["twist"] = module  # where `inspect` looks for the source
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def no_twist() -> Iterator[None]:
    yield
    sys.modules.pop("twist", None)


@pytest.mark.usefixtures("no_twist")
def test_an_operation_of_the_user_counts_with_its_source(tmp_path: Path) -> None:
    changed = OPERATION.replace("Transpose(0, 1).lower", "Transpose(1, 0).lower")
    elsewhere = OPERATION.replace("def recipe", "# not about the operation\ndef recipe")
    digests = [
        module_of(tmp_path / str(number), text).recipe().digest
        for number, text in enumerate((OPERATION, OPERATION, elsewhere, changed))
    ]
    assert digests[0] == digests[1] == digests[2] != digests[3]


@pytest.mark.usefixtures("no_twist")
def test_each_field_of_an_operation_of_the_user_counts(tmp_path: Path) -> None:
    recipe = module_of(tmp_path / "module", OPERATION).recipe
    fields: Mapping[str, tuple[object, ...]] = {"none": (), "text": ("b",), "number": ("a", 0.25), "sign": ("a", -0.5)}
    digests = {what: recipe(*args).digest for what, args in fields.items()}
    assert len(set(digests.values())) == len(fields)
    assert digests["none"] == recipe("a", 0.5).digest


@pytest.mark.usefixtures("no_twist")
def test_an_operation_of_the_user_is_compiled_and_counts_in_the_plan(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", {"w": raw("F32", 2, 3)})
    changed = OPERATION.replace("return self\n\ndef recipe", "return Transpose(0, 1)\n\ndef recipe")
    assert changed != OPERATION
    one, other = (
        compile_plan(tmp_path / "model.safetensors", module_of(tmp_path / str(number), text).recipe())
        for number, text in enumerate((OPERATION, changed))
    )
    assert one.head.tensors == other.head.tensors
    assert one.head.tensors[0].type.shape == (3, 2)
    assert one.digest != other.digest


def test_an_operation_without_source_is_refused() -> None:
    namespace: dict[str, object] = {"__name__": "nowhere"}
    exec(compile(OPERATION, "<no file>", "exec", dont_inherit=True), namespace)  # noqa: S102 - the text is above
    recipe = namespace["recipe"]
    assert callable(recipe)
    with pytest.raises(PatternError, match="Twist: its source cannot be read"):
        _ = recipe().digest
