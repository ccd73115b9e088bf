"""Index and config files: published ones against the standard library's parser, malformed ones against their verdict.

The rows are those of the list of malformed inputs that this project keeps: F are indices, G are configs. Real files
lie in tests/data; SOURCE.txt beside each says whose they are.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import json_texts

from loadplan.compiler.problem import CheckpointError
from loadplan.compiler.read_index import read_index, read_json

DATA = Path(__file__).parent.parent / "data"
INDEX = "model.safetensors.index.json"
GOOD = b'{"weight_map": {"a": "m.safetensors"}}'


def index_of(folder: Path, data: bytes) -> dict[str, str]:
    path = folder / INDEX
    path.write_bytes(data)
    return read_index(path, INDEX)


@pytest.mark.parametrize(
    ("file", "names"),
    [
        ("mixtral-8x22b/model.safetensors.index.json", 1739),
        ("llama3_1-70b/model.safetensors.index.json", 723),
        ("bloom-176b/pytorch_model.bin.index.HUGE-TOTAL.json", 845),  # F5
    ],
)
def test_published(file: str, names: int) -> None:
    found = read_index(DATA / file, file)
    assert found == json.loads((DATA / file).read_text(encoding="utf-8"))["weight_map"]
    assert len(found) == names


@pytest.mark.parametrize(
    ("file", "says"),
    [
        pytest.param("bloom-176b/model.safetensors.index.MERGE-CONFLICT.json", "not valid JSON: Extra data", id="F1"),
        pytest.param("hand-edited-index/hand-edited-index.NOT-JSON.txt", "not valid JSON: Expecting value", id="F2"),
    ],
)
def test_published_and_broken(file: str, says: str) -> None:
    with pytest.raises(CheckpointError, match=says) as caught:
        read_index(DATA / file, Path(file).name)
    (problem,) = caught.value.problems
    assert (problem.kind, problem.names) == ("index", (Path(file).name,))
    assert problem.message.startswith(Path(file).name)


def test_placeholder_keys(tmp_path: Path) -> None:
    """F2 without its comment: the `...` key is there twice."""
    text = (DATA / "hand-edited-index/hand-edited-index.NOT-JSON.txt").read_bytes().partition(b"\n")[2]
    with pytest.raises(CheckpointError, match=r"the key '\.\.\.' is there twice"):
        index_of(tmp_path, text)


@pytest.mark.parametrize(
    "metadata",
    [
        pytest.param('"metadata": {"total_size": 0},', id="F3"),
        pytest.param('"metadata": {"total_size": 13731385408.0},', id="F4"),
        pytest.param(f'"metadata": {{"total_size": {10**71}}},', id="F5"),
        pytest.param("", id="F6-none"),
        pytest.param('"metadata": null,', id="F6-null"),
        pytest.param('"metadata": {"total_parameters": 8.1e9, "mergekit_version": "0.1", "format": "pt"},', id="F6"),
        pytest.param('"metadata": {"total_size": 8},', id="F7"),
        pytest.param('"metadata": "lost",', id="text"),
    ],
)
def test_metadata_counts_for_nothing(tmp_path: Path, metadata: str) -> None:
    assert index_of(tmp_path, f'{{{metadata} "weight_map": {{"a": "m.safetensors"}}}}'.encode()) == {
        "a": "m.safetensors"
    }


@pytest.mark.parametrize("data", [GOOD.replace(b" ", b"\r\n"), b"\n\t" + GOOD + b"\n \r\n"], ids=["CRLF", "blanks"])
def test_blanks(tmp_path: Path, data: bytes) -> None:
    assert index_of(tmp_path, data) == {"a": "m.safetensors"}


def test_names_are_kept_as_they_are(tmp_path: Path) -> None:
    names = ["", "é", "e\u0301", "模型.重み", "a\n\x1b[31m", "..", "\U0001f600"]
    weight_map = dict.fromkeys(names, "sub/m-é.safetensors")
    for ascii_only in (True, False):
        text = json.dumps({"weight_map": weight_map}, ensure_ascii=ascii_only)
        assert index_of(tmp_path, text.encode()) == weight_map


@pytest.mark.parametrize(
    ("data", "says"),
    [
        pytest.param(b"", "not valid JSON", id="empty-file"),
        pytest.param(b"{}", "has no weight_map object", id="no-map"),
        pytest.param(b'{"weight_map": {}}', "weight_map is empty", id="B65-empty"),
        pytest.param(b'{"weight_map": null}', "has no weight_map object", id="F17-null"),
        pytest.param(b'{"weight_map": [["a", "m"]]}', "has no weight_map object", id="F17-list"),
        pytest.param(b'{"weight_map": "m"}', "has no weight_map object", id="F17-text"),
        pytest.param(b'[{"weight_map": {}}]', "holds a JSON list", id="top-list"),
        pytest.param(b"3", "holds a JSON int", id="top-number"),
        pytest.param(b'{"weight_map": {"a": "x", "b": "y", "a": "z"}}', "the key 'a' is there twice", id="F18"),
        pytest.param(b'{"weight_map": {"a": "x", "\\u0061": "z"}}', "the key 'a' is there twice", id="F18-escaped"),
        pytest.param(b'{"weight_map": {"a": "x"}, "weight_map": {}}', "the key 'weight_map' is there", id="F18-outer"),
        pytest.param('{"weight_map": {"a": "m"}}'.encode("utf-16"), "not valid JSON", id="F20-utf16"),
        pytest.param(b"\xef\xbb\xbf" + GOOD, "not valid JSON: Unexpected UTF-8 BOM", id="F20-bom"),
        pytest.param(b'{"weight_map": {"a": "m",}}', "not valid JSON", id="F20-comma"),
        pytest.param(b'{"weight_map": {"\xff": "m"}}', "not valid JSON: 'utf-8'", id="latin-1"),
        pytest.param(
            b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9\n",
            "is a git-lfs pointer.*git lfs pull",
            id="F21",
        ),
        pytest.param(b'{"metadata": {"x": NaN}, "weight_map": {"a": "m"}}', "NaN is not JSON", id="nan"),
        pytest.param(b'{"metadata": {"x": -Infinity}, "weight_map": {"a": "m"}}', "-Infinity is not JSON", id="inf"),
        pytest.param(b'{"weight_map": {"\\ud800": "m"}}', "lone surrogate", id="surrogate-name"),
        pytest.param(b'{"weight_map": {"a": "m\\udfff"}}', "lone surrogate", id="surrogate-file"),
        pytest.param(b'{"weight_map": ' + b"[" * 200_000, "not valid JSON", id="nesting-bomb"),
        pytest.param(b'{"metadata": ' + b"[" * 120 + b"]" * 120 + b"}", "nests more than 100 levels", id="nesting"),
        pytest.param(b'{"metadata": ' + b"9" * 5000 + b"}", "not valid JSON", id="5000-digits"),
    ],
)
def test_refused(tmp_path: Path, data: bytes, says: str) -> None:
    with pytest.raises(CheckpointError, match=says) as caught:
        index_of(tmp_path, data)
    assert [problem.kind for problem in caught.value.problems] == ["index"]
    assert all(INDEX in problem.message for problem in caught.value.problems)


OUTSIDE = [
    "",
    ".",
    "..",
    "../m.safetensors",
    "sub/../../m.safetensors",
    "/etc/passwd",
    "//host/m",
    "https://example.org/m.safetensors",
    "C:m.safetensors",
    "sub\\m.safetensors",
    "sub//m.safetensors",
    "./m.safetensors",
    "sub/./m.safetensors",
    "sub/",
    "m\0.safetensors",
]


@pytest.mark.parametrize("file", OUTSIDE)
def test_file_names_stay_inside(tmp_path: Path, file: str) -> None:
    """F16. The message shows the name escaped."""
    text = json.dumps({"weight_map": {"a": "m.safetensors", "b": file}})
    with pytest.raises(CheckpointError, match="not a file name inside the checkpoint folder") as caught:
        index_of(tmp_path, text.encode())
    (problem,) = caught.value.problems
    assert problem.names == (INDEX, "b")
    assert repr(file) in problem.message and problem.message.isprintable()


@pytest.mark.parametrize("value", [None, 3, True, 1.5, ["m"], {"file": "m"}])
def test_files_are_names(tmp_path: Path, value: object) -> None:
    """F17."""
    with pytest.raises(CheckpointError, match=r"'a' lies in a JSON .*, the name of a file belongs there"):
        index_of(tmp_path, json.dumps({"weight_map": {"a": value}}).encode())


def test_all_faults_at_once(tmp_path: Path) -> None:
    weight_map = {"a": "../x", "b": "good.safetensors", "c": 3, "d": "", "e": "also-good.safetensors"}
    with pytest.raises(CheckpointError) as caught:
        index_of(tmp_path, json.dumps({"weight_map": weight_map}).encode())
    assert [problem.names[1] for problem in caught.value.problems] == ["a", "c", "d"]


def test_unreadable(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{INDEX}: cannot be read: No such file"):
        read_index(tmp_path / INDEX, INDEX)
    with pytest.raises(CheckpointError, match=f"{INDEX}: cannot be read: Is a directory"):
        read_index(tmp_path, INDEX)


def test_too_large(tmp_path: Path) -> None:
    with (tmp_path / INDEX).open("wb") as file:
        file.truncate((1 << 28) + 1)  # a hole: takes no space, and must not be read
    with pytest.raises(CheckpointError, match=f"{INDEX}: has 268435457 bytes, at most 268435456 are read"):
        read_index(tmp_path / INDEX, INDEX)


def config_of(folder: Path, data: bytes) -> dict[str, object]:
    (folder / "config.json").write_bytes(data)
    return read_json(folder / "config.json", "config.json", "config")


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("mixtral-8x22b/config.json", "num_local_experts", 8),
        ("llama3_1-70b/config.json", "architectures", ["LlamaForCausalLM"]),
        ("bloom-176b/config.json", "model_type", "bloom"),
    ],
)
def test_published_configs(file: str, key: str, value: object) -> None:
    found = read_json(DATA / file, file, "config")
    assert found == json.loads((DATA / file).read_text(encoding="utf-8"))
    assert found[key] == value


def test_published_and_broken_config() -> None:
    """G1: a line of a git configuration behind the closing brace."""
    with pytest.raises(CheckpointError, match=r"config\.json: is not valid JSON: Extra data") as caught:
        read_json(DATA / "lisa-llava-sam/config.TRAILING-JUNK.json", "config.json", "config")
    assert [problem.kind for problem in caught.value.problems] == ["config"]


def test_config_values_are_kept(tmp_path: Path) -> None:
    """G3, G5, G6: contradictions, lists for numbers, nulls and zeros are for whoever reads the values."""
    config = {
        "num_key_value_heads": 32,
        "num_query_groups": 2,
        "moe_num_experts": [64, 64],
        "head_dim": None,
        "text_config": {"hidden_size": 0},
        "rope_theta": 1e6,
    }
    assert config_of(tmp_path, json.dumps(config).encode()) == config


@pytest.mark.parametrize(
    ("data", "says"),
    [
        pytest.param(b'{"x": NaN}', "NaN is not JSON", id="G10-nan"),
        pytest.param(b'{"x": [Infinity]}', "Infinity is not JSON", id="G10-inf"),
        pytest.param(b'{"x": 1, "x": 1}', "the key 'x' is there twice", id="G10-twice"),
        pytest.param(b'{"a": {"x": 1, "x": 2}}', "the key 'x' is there twice", id="G10-twice-inside"),
        pytest.param(b'{"a": ["\\udc00"]}', "lone surrogate", id="surrogate"),
        pytest.param(b"version https://git-lfs.github.com/spec/v1\n", "git-lfs pointer", id="lfs"),
        pytest.param(b"", "not valid JSON", id="empty"),
    ],
)
def test_refused_configs(tmp_path: Path, data: bytes, says: str) -> None:
    with pytest.raises(CheckpointError, match=says) as caught:
        config_of(tmp_path, data)
    assert [(problem.kind, problem.names) for problem in caught.value.problems] == [("config", ("config.json",))]


def test_huge_integers_are_exact(tmp_path: Path) -> None:
    """G10: 2^53 + 1 has no double."""
    assert config_of(tmp_path, f'{{"x": {2**53 + 1}, "y": {10**100}}}'.encode()) == {"x": 2**53 + 1, "y": 10**100}


@given(text=json_texts())
def test_any_json(tmp_path: Path, text: bytes) -> None:
    """Only CheckpointError; what is accepted is what the standard library reads."""
    try:
        found = config_of(tmp_path, text)
    except CheckpointError:
        return
    assert found == json.loads(text)


@given(text=json_texts(key="weight_map"))
def test_any_index(tmp_path: Path, text: bytes) -> None:
    try:
        found = index_of(tmp_path, text)
    except CheckpointError:
        return
    assert found == json.loads(text)["weight_map"]
    for file in found.values():
        assert (tmp_path / file).resolve().is_relative_to(tmp_path.resolve())


@given(data=st.binary(max_size=40) | st.binary(max_size=4).map(lambda tail: GOOD + tail))
def test_any_bytes(tmp_path: Path, data: bytes) -> None:
    try:
        assert index_of(tmp_path, data) == json.loads(data)["weight_map"]
    except CheckpointError as error:
        assert error.problems
