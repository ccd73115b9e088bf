"""Every published key set, as a twin of full size: it compiles, or is refused with a message that can be acted on.

The shapes are facts of the architecture (`shapes.py`), and their bytes are what the publisher counted; names, shapes
and ties of the model are transformers'. Where a key set is refused, doing what the message says makes it compile.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from builders import raw, write_file
from corpus.key_sets import KEY_SETS, KeySet
from corpus.twins import DATA, HERE, MARK, Twin, compile_twin, make_twin, row, table, told

from loadplan.compiler import compile_plan
from loadplan.compiler.problem import CompileError
from loadplan.runtime import Plan

every_key_set = pytest.mark.parametrize("key_set", KEY_SETS, ids=lambda key_set: key_set.name.replace(" ", "-"))


@cache
def made(key_set_name: str) -> tuple[Twin, Plan | CompileError]:
    """The twin (its files are gone), and what the compiler made of it."""
    key_set = next(one for one in KEY_SETS if one.name == key_set_name)
    with TemporaryDirectory() as folder:
        twin = make_twin(key_set, Path(folder))
        try:
            return twin, compile_twin(key_set, twin)
        except CompileError as error:
            return twin, error


@every_key_set
def test_the_twin_has_the_bytes_that_the_publisher_counted(key_set: KeySet) -> None:
    twin, _ = made(key_set.name)
    if twin.total_size is not None:
        assert twin.total_size - twin.data_nbytes == key_set.counted


@every_key_set
def test_it_compiles_or_is_refused_as_expected(key_set: KeySet) -> None:
    twin, result = made(key_set.name)
    if isinstance(result, CompileError):
        assert {problem.kind for problem in result.problems} == key_set.kinds, result
        for words in key_set.words:
            assert words in str(result)
        return
    assert not key_set.kinds
    report = result.report
    assert (report.targets, len(report.unused), report.missing) == (key_set.targets, key_set.unused, ())
    assert report.sources == len(twin.names)
    everything = "\n".join((told(result), *report.notes, *report.unused))
    for words in key_set.words:
        assert words in everything


@every_key_set
def test_a_plan_reads_each_byte_that_is_loaded_once(key_set: KeySet) -> None:
    twin, result = made(key_set.name)
    if isinstance(result, CompileError):
        pytest.skip("is refused")
    read = result.cost(0).read_nbytes
    loaded = sum(tensor.type.nbytes for tensor in result.head.tensors)
    assert loaded == read or result.report.casts
    assert read <= twin.data_nbytes
    assert (read == twin.data_nbytes) == (not result.report.unused)


@pytest.mark.parametrize(
    "key_set", [one for one in KEY_SETS if one.cure], ids=lambda key_set: key_set.name.replace(" ", "-")
)
def test_doing_what_the_message_says_makes_it_compile(key_set: KeySet, tmp_path: Path) -> None:
    twin = make_twin(key_set, tmp_path, cured=True)
    plan = compile_twin(key_set, twin, cured=True)
    assert plan.report.targets == key_set.targets or key_set.targets == 0


@every_key_set
def test_a_message_fits_on_a_screen(key_set: KeySet) -> None:
    _, result = made(key_set.name)
    if isinstance(result, CompileError):
        assert len(str(result).splitlines()) <= 52


def test_a_short_message_stands_for_all_problems() -> None:
    _, result = made("minicpm-v-2_6")
    assert isinstance(result, CompileError)
    named = {name for problem in result.problems for name in problem.names}
    assert len(named) == 450 and {name.partition(".")[0] for name in named} == {"resampler", "vpm"}
    assert f"{len(result.problems)} problems of" in str(result)


@pytest.mark.parametrize(  # published grammars; their indices are too large to be carried
    ("endings", "said"),
    [
        pytest.param("qweight qzeros scales", "qweight, qzeros, scales", id="DeepSeek-V3 in AWQ"),
        pytest.param("quant_weight weight_scale", "quant_weight, weight_scale", id="ERNIE 4.5 in FP8"),
        pytest.param("weight weight_scale_inv", "weight_scale_inv", id="DeepSeek-V3 in FP8"),
        pytest.param(
            "weight_packed weight_scale weight_zero_point weight_shape",
            "weight_packed, weight_scale, weight_shape, weight_zero_point",
            id="Qwen3.6 in compressed-tensors",
        ),
        pytest.param("qweight scales res_u res_v salient_idx", "qweight, scales", id="Spark 2.5 in INT4 and INT8"),
    ],
)
def test_a_quantised_checkpoint_is_called_so(endings: str, said: str, tmp_path: Path) -> None:
    layers = [f"model.layers.{number}.mlp.up_proj" for number in range(4)]
    write_file(
        tmp_path / "model.safetensors",
        {f"{layer}.{ending}": raw("U8", 4, 4) for layer in layers for ending in endings.split()},
    )
    wanted = {f"{layer}.weight": ((4, 4), "U8") for layer in layers}
    with pytest.raises(CompileError, match=rf"the checkpoint is quantised: \d+ names end in {said}, ") as caught:
        compile_plan(tmp_path, signature=wanted)
    assert "signature='recipe'" in str(caught.value)
    assert compile_plan(tmp_path, signature="recipe").report.targets == 4 * len(endings.split())


@pytest.mark.parametrize("front", ["", "model."])
def test_a_change_of_prefix_comes_before_other_advice(front: str, tmp_path: Path) -> None:
    names = [f"layers.{number}.weight" for number in range(60)]
    write_file(tmp_path / "model.safetensors", {f"{front}{name}": raw("U8", 2) for name in names})
    other = "model." if not front else ""
    with pytest.raises(CompileError) as caught:
        compile_plan(tmp_path, signature={f"{other}{name}": ((2,), "U8") for name in names})
    first, *rest = str(caught.value).splitlines()[1:]
    assert "the rule PrefixChange" in first
    assert len(rest) == 2 and all(line.endswith("(60 times)") for line in rest)


def test_the_table_is_up_to_date() -> None:
    """Write it with `cd tests && python -m corpus.twins --write`."""
    rows = [row(key_set, made(key_set.name)[1], len(made(key_set.name)[0].names)) for key_set in KEY_SETS]
    assert (HERE / "README.md").read_text().partition(MARK)[2] == f"\n{table(rows)}"


def test_every_folder_of_the_corpus_is_used_and_says_where_it_is_from() -> None:
    used = {key_set.folder or key_set.name for key_set in KEY_SETS}
    carried = {path.name for path in (DATA / "corpus").iterdir()}
    assert carried <= used
    for name in used:
        folder = DATA / "corpus" / name if name in carried else DATA / name
        assert (folder / "SOURCE.txt").is_file()
