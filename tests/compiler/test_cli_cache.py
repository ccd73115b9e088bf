"""`loadplan cache ...`, as a person and as a machine reads it; the cache itself is tested in tests/cache."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from loadplan.cache import Cache
from loadplan.compiler.cli import main
from loadplan.compiler.show_cache import show_age, show_size

A, B, C = ("a" * 64, "ab" * 32, "c" * 64)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three entries: a plan and a proof of one variant, a plan of another; one blob is shared."""
    cache = Cache(tmp_path / "cache")
    cache.put(A, {"plan": b"x" * 2000}, {"kind": "plan", "label": "m@v"})
    cache.put(B, {}, {"kind": "proof", "label": "m@v"})
    cache.put(C, {"plan": b"x" * 2000, "more": b"y" * 500}, {"kind": "plan", "label": "other@\x1b[2Jv"})
    return tmp_path / "cache"


@pytest.fixture
def run(root: Path, capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    def run(*args: str | Path, code: int = 0) -> str:
        command, *rest = map(str, args)
        assert main(["cache", command, "--root", str(root), *rest]) == code
        return "".join(capsys.readouterr())

    return run


def test_ls_is_a_table_for_people_and_json_for_machines(run, root: Path) -> None:  # type: ignore[no-untyped-def]
    lines = run("ls").splitlines()
    assert lines[0].split() == ["key", "kind", "label", "size", "made", "used", "pins"]
    assert {line.split()[0] for line in lines[1:]} == {key[:12] for key in (A, B, C)}
    assert next(line for line in lines if line.startswith(C[:12])).split()[1:5] == ["plan", "other@?[2Jv", "2.4", "KiB"]
    found = {entry["key"]: entry for entry in json.loads(run("ls", "--json"))}
    assert found[A]["nbytes"] == 2000
    assert found[C]["info"]["kind"] == "plan"
    assert {entry["key"] for entry in json.loads(run("ls", "--json", "m@v"))} == {A, B}
    assert [entry["key"] for entry in json.loads(run("ls", "--json", "aa"))] == [A]


def test_entries_that_are_not_there(run) -> None:  # type: ignore[no-untyped-def]
    assert "nothing is called 'm@w'; labels are m@v; `loadplan cache ls` lists all" in run("ls", "m@w", code=1)
    assert "2 keys begin with 'a'; give more digits" in run("ls", "a", code=1)


def test_info_says_what_is_shared(run) -> None:  # type: ignore[no-untyped-def]
    said = run("info")
    assert "3 entries, 0 pins, 2 blobs, 2.4 KiB (no bound)" in said
    assert "entries hold 4.4 KiB; stored for them 56% of that" in said
    found = json.loads(run("info", "--json"))
    assert (found["nbytes"], found["entry_nbytes"]) == (2500, 4500)


def test_check_and_repair(run, root: Path) -> None:  # type: ignore[no-untyped-def]
    assert "0 problems" in run("check")
    blob = next(path for path in (root / "blobs").glob("??/*") if path.stat().st_size == 500)
    blob.chmod(0o600)
    blob.write_bytes(b"z" * 500)
    said = run("check", code=1)
    assert f"damaged: {blob}" in said
    found = json.loads(run("check", "--json", code=1))
    assert {"kind": "damaged", "path": str(blob)} in [{k: p[k] for k in ("kind", "path")} for p in found["problems"]]
    assert f"damaged: {blob}" in run("repair", "--dry-run")
    assert blob.exists()
    assert f"removed: damaged: {blob}" in run("repair")
    assert not blob.exists()
    assert Cache(root).fetch(C) is None
    assert Cache(root).fetch(A) == {"plan": b"x" * 2000}


def test_gc_keeps_pins_and_says_what_it_would_do(run, root: Path) -> None:  # type: ignore[no-untyped-def]
    assert "pinned: m@v plan (aaaaaaaaaaaa)" in run("pin", "aa")
    assert json.loads(run("pin", "m@v", "--name", "release", "--json")) == {
        "release m@v plan": A, "release m@v proof": B,
    }  # fmt: skip
    said = run("gc", "-n", "--max-size", "0 B", "--grace", "0 s")
    assert "1 entries, 1 blobs and 0 temporary files would be removed, 500 B" in said
    assert Cache(root).fetch(C) is not None
    found = json.loads(run("gc", "--max-size", "0 B", "--grace", "0 s", "--json"))
    assert [entry["key"] for entry in found["evicted"]] == [C]
    assert Cache(root).fetch(C) is None
    assert Cache(root).fetch(A) is not None
    assert "unpinned: release m@v plan" in run("unpin", "release m@v plan")
    assert "no pin is called 'release m@v plan'" in run("unpin", "release m@v plan", code=1)
    run("unpin", "m@v plan", "release m@v proof")
    assert "2 entries" in run("gc", "--max-age", "0 s", "--grace", "0 s")
    assert run("ls").splitlines()[1:] == []


def test_push_and_pull_with_a_folder(run, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    shared = tmp_path / "shared"
    shared.mkdir()
    assert set(run("push", "--remote", shared, "-n").split()) == {A, B, C}
    assert not list(shared.iterdir())
    said = run("push", "--remote", shared)
    assert re.search("3 entries and 2 blobs sent, 2.4 KiB; 0 B were there", said)
    assert json.loads(run("push", "--remote", shared, "m@v", "--json"))[str(shared)]["blobs"] == 0
    capsys.readouterr()
    command = ["cache", "pull", "--root", str(tmp_path / "elsewhere"), "--remote", str(shared), A, C]
    assert main(command) == 0
    assert f"{A[:12]}: here" in capsys.readouterr().out
    assert Cache(tmp_path / "elsewhere").fetch(C) == Cache(root).fetch(C)
    assert main([*command[:-1], "d" * 64]) == 1
    assert f"{'d' * 12}: not found" in capsys.readouterr().out


def test_the_cache_of_a_project_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["cache", "ls"]) == 1
    assert "loadplan.toml: not in this folder; give the cache with --root FOLDER" in capsys.readouterr().err
    text = "[cache]\nroot = 'c'\nmax_size = '1 GiB'\n[cache.remote.r]\nurl = 's3://b'\n"
    text += "[checkpoint.a]\nsource = 'x'\n[checkpoint.a.variant.v]\n"
    (tmp_path / "loadplan.toml").write_text(text, encoding="utf-8")
    assert main(["cache", "info"]) == 0
    said = capsys.readouterr().out
    assert f"{tmp_path / 'c'}: 0 entries" in said
    assert "(bound 1.0 GiB)" in said
    assert "remote r: s3://b (read only)" in said


def test_wrong_sizes_are_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["cache", "gc", "--max-size", "many"])
    assert caught.value.code == 2
    assert "'many' is not a size; write for example" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 KiB"), (1536, "1.5 KiB"), (10 << 10, "10 KiB"), (999 << 20, "999 MiB"),
     (200 << 30, "200 GiB"), (5 << 40, "5.0 TiB"), (5000 << 40, "5000 TiB")],
)  # fmt: skip
def test_sizes(nbytes: int, text: str) -> None:
    assert show_size(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "now"), (0.5, "now"), (59, "59 s"), (119, "119 s"), (120, "2 min"), (7199, "119 min"), (7200, "2 h"),
     (172799, "47 h"), (172800, "2 d"), (8640000, "100 d")],
)  # fmt: skip
def test_ages(seconds: float, text: str) -> None:
    assert show_age(seconds) == text
