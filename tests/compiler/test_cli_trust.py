"""Keys and signatures on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import raw, write_file

from loadplan.compiler.cli import main


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("LOADPLAN_REQUIRE_SIGNED", "LOADPLAN_TRUSTED_KEYS"):
        monkeypatch.delenv(name, raising=False)
    write_file(tmp_path / "m" / "m.safetensors", {"w": raw("F32", 4, 6)})


def test_from_key_to_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "new", "ci"]) == 0
    short = capsys.readouterr().out.split("signs as ")[1][:16]
    assert main(["key", "show", "ci.pub.pem"]) == 0
    shown = capsys.readouterr().out
    assert shown == f"{short}\n{Path('ci.pub.pem').read_text()}"
    assert main(["key", "show", "ci.pem"]) == 0
    assert capsys.readouterr().out == shown
    assert main(["compile", "m", "-o", "p"]) == 0
    assert main(["convert", "p", "m", "folder"]) == 0
    assert main(["check", "folder", "--trusted", "ci.pub.pem"]) == 1
    assert "artifact.loadplan: is not signed, and must be" in capsys.readouterr().err
    assert main(["sign", "folder", "--key", "ci.pem"]) == 0
    assert f"signed by {short}" in capsys.readouterr().out
    assert main(["check", "folder", "--trusted", "ci.pub.pem"]) == 0
    assert f"folder: signed by {short}, trusted" in capsys.readouterr().out
    assert main(["check", "folder"]) == 0
    assert f"says it is signed by {short}, not checked" in capsys.readouterr().out


def test_a_checkpoint_that_was_signed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["key", "new", "ci"])
    main(["compile", "m", "-o", "p"])
    assert main(["check", "p"]) == 0
    assert "p: is not signed" in capsys.readouterr().out
    assert main(["sign", "p", "--key", "ci.pem", "--checkpoint", "m"]) == 0
    assert main(["check", "p", "m", "--trusted", "ci.pub.pem"]) == 0
    assert "m: 1 files hold what was signed" in capsys.readouterr().out
    data = bytearray(Path("m/m.safetensors").read_bytes())
    data[-1] ^= 1
    Path("m/m.safetensors").write_bytes(data)
    assert main(["check", "p", "m"]) == 0
    assert main(["check", "p", "m", "--trusted", "ci.pub.pem"]) == 1
    assert "what was signed is" in capsys.readouterr().err


def test_nothing_is_overwritten_or_signed_by_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    main(["key", "new", "ci"])
    before = Path("ci.pem").read_bytes()
    assert main(["key", "new", "ci"]) == 1
    assert Path("ci.pem").read_bytes() == before
    main(["compile", "m", "-o", "p"])
    data = bytearray(Path("p").read_bytes())
    data[-1] ^= 1
    Path("bad").write_bytes(data)
    for args in (
        ["sign", "p", "--key", "ci.pub.pem"],
        ["sign", "bad", "--key", "ci.pem"],
        ["sign", "p", "--key", "no"],
    ):
        assert main(args) == 1
    assert not Path("p.sig").exists() and not Path("bad.sig").exists()
    assert "holds a public key, which cannot sign" in capsys.readouterr().err


def test_signed_again(capsys: pytest.CaptureFixture[str]) -> None:
    """One signature a key; those of an older plan go."""
    for name in ("a", "b"):
        main(["key", "new", name])
    main(["compile", "m", "-o", "p"])
    for key in ("a.pem", "b.pem", "a.pem"):
        assert main(["sign", "p", "--key", key]) == 0
    assert Path("p.sig").read_text().count('"signature":') == 2
    main(["compile", "m", "-o", "p", "--dtype", "bfloat16"])
    assert main(["check", "p", "--trusted", "a.pub.pem"]) == 1
    assert "and what was signed is" in capsys.readouterr().err
    assert main(["sign", "p", "--key", "a.pem"]) == 0
    assert Path("p.sig").read_text().count('"signature":') == 1
    assert main(["check", "p", "--trusted", "a.pub.pem"]) == 0
