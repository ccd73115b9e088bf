"""loadplan.toml: what is read from literal files, and the exact words with which faulty ones are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadplan.compiler.build_file import BuildFileError, read_project


def _write(folder: Path, text: str) -> Path:
    path = folder / "loadplan.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_project_is_read(tmp_path: Path) -> None:
    project = read_project(
        _write(
            tmp_path,
            """
            [build]
            output = "out"
            [checkpoint.small]
            source = "weights/small"
            [checkpoint.small.variant.tp2]
            tp_size = 2
            dtype = "bfloat16"
            [checkpoint.small.variant.plain]
            convert = false
            [checkpoint.big]
            source = "pkg://some_package/model"
            [checkpoint.big.variant.plain]
            """,
        )
    )
    assert [variant.label for variant in project.variants] == ["big@plain", "small@plain", "small@tp2"]
    assert project.get("small@tp2").options.tp_size == 2
    assert project.get("small@tp2").source == str(tmp_path / "weights/small")
    assert project.get("big@plain").source == "pkg://some_package/model"
    assert not project.get("small@plain").options.convert
    assert project.output == tmp_path / "out"
    assert project.cache == tmp_path / ".loadplan"
    with pytest.raises(BuildFileError, match="did you mean 'small@tp2'"):
        project.get("small@tp")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[checkpoint.a]\nsource = 'x'\n[checkpoint.a.variant.v]\ntp_sise = 2", "checkpoint.a.variant.v.tp_sise: is not a key; did you mean 'tp_size'?"),
        ("[checkpoint.a]\nsorce = 'x'\n[checkpoint.a.variant.v]", "checkpoint.a.source: must be given"),
        ("[checkpoint.a]\nsource = 'x'\n[checkpoint.a.variant.v]\ntp_size = '2'", "checkpoint.a.variant.v.tp_size: Input should be a valid integer (found '2')"),
        ("[checkpoint.a]\nsource = 'x'\n[checkpoint.a.variant.v]\nsignature = 'none'", "checkpoint.a.variant.v.signature: Input should be 'auto', 'transformers' or 'recipe' (found 'none')"),
        ("[checkpoint.a]\nsource = 'x'\n[checkpoint.a.variant]", "checkpoint.a has no variant"),
        ("[checkpoint.a]\nsource = 'x'", "checkpoint.a.variant: must be given"),
        ("[checkpoint.'../a']\nsource = 'x'\n[checkpoint.'../a'.variant.v]", "checkpoint.../a: String should match pattern"),
        ("[biuld]\n[checkpoint.a]\nsource = 'x'\n[checkpoint.a.variant.v]", "biuld: is not a key; did you mean 'build'?"),
        ("", "checkpoint: must be given"),
        ("[checkpoint", "is not valid TOML"),
    ],
)  # fmt: skip
def test_a_fault_names_its_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BuildFileError) as caught:
        read_project(_write(tmp_path, text))
    assert message in str(caught.value)
    assert "loadplan.toml" in str(caught.value)


def test_all_faults_are_reported_at_once(tmp_path: Path) -> None:
    text = "[checkpoint.a]\n[checkpoint.a.variant.v]\ndtpye = 'F16'\ntp_size = 'two'"
    with pytest.raises(BuildFileError, match="3 faults") as caught:
        read_project(_write(tmp_path, text))
    assert all(key in str(caught.value) for key in ("source", "dtpye", "tp_size"))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BuildFileError, match=r"loadplan\.toml: cannot be read"):
        read_project(tmp_path / "loadplan.toml")
