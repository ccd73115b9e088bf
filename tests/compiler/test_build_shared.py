"""Two machines and what they share: A has the checkpoint and builds, B has loadplan.toml and loadplan.lock.

Machines are folders with stores of their own; the remote is a folder, or a server where the test says so. Remotes of all
kinds by themselves are in tests/cache/remotes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from builders import bytes_of
from remote_servers import NGINX, run_cache_server, run_nginx, run_s3
from safetensors.torch import load_file, save_file

from loadplan.runtime import Artifact, Plan, load_state_dict

RECIPES = """
from loadplan.recipes import Recipe, WeightRenaming

def recipe(config):
    return Recipe(rules=(WeightRenaming("old", config.find("new_name")),), tp_plan={"*.w": "colwise"})
"""

PROJECT = """
[defaults]
recipe = "recipes.py:recipe"
signature = "recipe"
[checkpoint.one]
source = "weights"
[checkpoint.one.variant.plain]
convert = false
[checkpoint.one.variant.tp2]
tp_size = 2
[cache.remote.shared]
url = URL
read_only = READ_ONLY
"""


def _machine(folder: Path, read_only: str = "true", more: str = "", url: str = '"../shared"') -> Path:
    folder.mkdir(parents=True)
    text = PROJECT.replace("READ_ONLY", read_only).replace("URL", url)
    (folder / "loadplan.toml").write_text(f"{more}{text}", encoding="utf-8")
    (folder / "recipes.py").write_text(RECIPES, encoding="utf-8")
    (folder / "dodo.py").write_text("from loadplan.compiler.tasks import *\n", encoding="utf-8")
    return folder


def _doit(folder: Path, *args: str, code: int = 0) -> str:
    env = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "doit", *args], cwd=folder, capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def _ran(said: str) -> list[str]:
    return sorted(re.findall(r"^\.  (\S+)", said, re.MULTILINE))


@pytest.fixture(scope="module")
def pushed_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with machine A, which has built and pushed, and the remote."""
    root = tmp_path_factory.mktemp("fleet")
    (root / "shared").mkdir()
    a = _machine(root / "a", read_only="false")
    (a / "weights").mkdir()
    save_file({"old.w": torch.arange(24.0).view(4, 6), "b": torch.ones(3)}, a / "weights" / "model.safetensors")
    (a / "weights" / "config.json").write_text('{"new_name": "new"}', encoding="utf-8")
    said = _doit(a, "compile", "convert", "verify", "push")
    assert "loadplan.lock: 1 checkpoints, written" in said
    assert re.search(r"one@tp2: to shared: [1-9]\d* blobs", said)
    return root


@pytest.fixture
def fleet(pushed_once: Path, tmp_path: Path) -> Path:
    shutil.copytree(pushed_once, tmp_path / "fleet")
    return tmp_path / "fleet"


def _machine_b(fleet: Path) -> Path:
    """Another path, another store, no checkpoint."""
    b = _machine(fleet / "b")
    shutil.copy(fleet / "a" / "loadplan.lock", b)
    return b


def test_b_pulls_loads_and_is_up_to_date_without_a_checkpoint(fleet: Path) -> None:
    a, b = fleet / "a", _machine_b(fleet)
    said = _doit(b)
    assert said.count("from the cache") == 3
    assert said.count("checked before: verified: ") == 2
    assert "compiled:" not in said
    out = b / "build" / "loadplan"
    stored = load_file(a / "weights" / "model.safetensors")
    for rank in range(2):
        found = load_state_dict(Artifact.open(out / "one@tp2.converted"), rank=rank)
        assert torch.equal(found["new.w"], stored["old.w"][2 * rank : 2 * rank + 2])
    for path in sorted((a / "build" / "loadplan").rglob("*")):
        if path.is_file() and "records" not in path.parts:
            assert (out / path.relative_to(a / "build" / "loadplan")).read_bytes() == path.read_bytes()
    assert _ran(_doit(b)) == []
    shutil.rmtree(fleet / "shared")  # with all that is needed here, nobody is asked
    assert _ran(_doit(b)) == []


@contextmanager
def _server(kind: str, folder: Path) -> Iterator[str]:
    """What follows `url =` for a real server of this kind."""
    if kind == "s3":
        with run_s3() as endpoint:
            storage = f'{{ key = "a", secret = "b", client_kwargs = {{ endpoint_url = "{endpoint}" }} }}'
            yield f'"s3://bucket/fleet"\nstorage = {storage}'
    elif kind == "nginx":
        if NGINX is None:
            pytest.skip("nginx is not installed (Debian: apt-get install nginx-light)")
        with run_nginx(folder / "nginx") as nginx:
            yield f'"http://127.0.0.1:{nginx.port}/open"'
    else:
        with run_cache_server(zstd=True) as server:
            yield f'"{server.url}"\nzstd = true'


@pytest.mark.parametrize("kind", ["s3", "nginx", "bazel"])
def test_over_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A builds and pushes; B, with nothing but loadplan.toml and loadplan.lock, has the same bits, and builds nothing."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with _server(kind, tmp_path) as url:
        a = _machine(tmp_path / "fleet" / "a", read_only="false", url=url)
        (a / "weights").mkdir()
        save_file({"old.w": torch.randn(4, 6), "b": torch.ones(3)}, a / "weights" / "model.safetensors")
        (a / "weights" / "config.json").write_text('{"new_name": "new"}', encoding="utf-8")
        _doit(a, "compile", "convert", "verify", "push")
        b = _machine(tmp_path / "fleet" / "b", url=url)
        shutil.copy(a / "loadplan.lock", b)
        said = _doit(b)
        assert (said.count("from the cache"), said.count("compiled:"), said.count("converted:")) == (3, 0, 0)
    for rank in range(2):
        built, pulled = (load_state_dict(m / "build" / "loadplan" / "one@tp2.converted", rank=rank) for m in (a, b))
        assert {n: bytes_of(t) for n, t in pulled.items()} == {n: bytes_of(t) for n, t in built.items()}
    assert _ran(_doit(b)) == []  # and nobody is asked: the server is gone


def test_pull_lays_out_and_builds_nothing(fleet: Path) -> None:
    b = _machine_b(fleet)
    said = _doit(b, "pull")
    assert "one@tp2: pulled: " in said
    assert "one@plain: pulled the plan, 2 targets" in said
    assert _ran(_doit(b, "pull", "compile", "convert")) == []


def test_b_never_takes_an_old_answer_for_a_new_question(fleet: Path) -> None:
    """What A has not built is not there: B says so, and what to do."""
    b = _machine_b(fleet)
    toml = b / "loadplan.toml"
    toml.write_text(toml.read_text().replace("tp_size = 2", "tp_size = 3"), encoding="utf-8")
    said = _doit(b, "convert:one@tp2", code=1)
    assert "weights is not on this machine, and neither cache nor remotes have its plan; run `doit push`" in said
    toml.write_text(toml.read_text().replace('source = "weights"', 'source = "weights-v2"'), encoding="utf-8")
    said = _doit(b, "compile:one@plain", code=1)
    assert "weights-v2: no such file or folder; and loadplan.lock has no one" in said
    assert not (b / "build").exists() or not list((b / "build").rglob("*.loadplan"))


def test_the_disk_counts_where_there_is_a_checkpoint(fleet: Path) -> None:
    b = _machine_b(fleet)
    (b / "weights").mkdir()
    save_file({"old.w": torch.zeros(4, 6)}, b / "weights" / "model.safetensors")
    (b / "weights" / "config.json").write_text('{"new_name": "new"}', encoding="utf-8")
    said = _doit(b)
    assert "one@tp2: converted: " in said
    assert not load_state_dict(Artifact.open(b / "build/loadplan/one@tp2.converted"))["new.w"].any()


@pytest.mark.parametrize("how", ["damaged", "lying", "gone", "not a remote"])
def test_a_bad_remote_costs_work_and_nothing_else(fleet: Path, how: str) -> None:
    b = _machine_b(fleet)
    shutil.copytree(fleet / "a" / "weights", b / "weights")
    files = [path for path in (fleet / "shared").rglob("*") if path.is_file()]
    assert files
    for path in files:
        data = path.read_bytes()
        path.chmod(0o600)
        path.write_bytes({"damaged": data[: len(data) // 2], "lying": b"x" * len(data)}.get(how, data))
    if how in ("gone", "not a remote"):
        shutil.rmtree(fleet / "shared")
    if how == "not a remote":
        (fleet / "shared").write_bytes(b"")
    said = _doit(b)
    assert said.count("compiled:") == 2
    out = Path("build", "loadplan", "one@tp2.converted")
    for path in (fleet / "a" / out).iterdir():
        assert (b / out / path.name).read_bytes() == path.read_bytes()
    assert _ran(_doit(b)) == []


def test_push_auto_gives_each_thing_that_is_built(tmp_path: Path, fleet: Path) -> None:
    root = tmp_path / "new"
    (root / "shared").mkdir(parents=True)
    c = _machine(root / "c", read_only="false", more='[cache]\npush = "auto"\n')
    shutil.copytree(fleet / "a" / "weights", c / "weights")
    _doit(c)
    _doit(c, "lock")
    d = _machine(root / "d")
    shutil.copy(c / "loadplan.lock", d)
    assert "checked before" in _doit(d)
    (c / "loadplan.toml").write_text(
        (c / "loadplan.toml").read_text().replace("../shared", "/dev/null/shared").replace("[checkpoint.one.variant.tp2]", '[checkpoint.one.variant.tp2]\ndtype = "float16"'),
        encoding="utf-8",
    )  # fmt: skip
    said = _doit(c)
    assert "(not pushed; `doit push` does it later)" in said
    assert "one@tp2: converted: " in said


def test_push_needs_a_remote_that_may_be_written(fleet: Path) -> None:
    a = fleet / "a"
    (a / "loadplan.toml").write_text(
        PROJECT.replace("READ_ONLY", "true").replace("URL", '"../shared"'), encoding="utf-8"
    )
    said = _doit(a, "push", code=1)
    assert "no remote may be written; add [cache.remote.NAME]" in said


def test_never_pull_asks_nobody(fleet: Path) -> None:
    b = _machine_b(fleet)
    toml = b / "loadplan.toml"
    toml.write_text('[cache]\npull = "never"\n' + toml.read_text(), encoding="utf-8")
    assert "neither cache nor remotes have its plan" in _doit(b, "compile", code=1)


@pytest.mark.parametrize(
    ("junk", "message"),
    [
        ("{", "is not JSON"),
        ("{}", "is not a lock file of this version"),
        ('{"format": 1, "checkpoints": {"one": {"source": "weights"}}}', "one: is not what this version writes"),
    ],
)
def test_a_damaged_lock_file_is_told(fleet: Path, junk: str, message: str) -> None:
    b = _machine_b(fleet)
    (b / "loadplan.lock").write_text(junk, encoding="utf-8")
    said = _doit(b, "compile:one@plain", code=1)
    assert message in said
    assert "restore it, or write it again with `doit lock` where the checkpoints are" in said


def test_a_pushed_plan_names_no_machine(fleet: Path) -> None:
    assert "pytest" not in (fleet / "a" / "loadplan.lock").read_text(encoding="utf-8")  # of the temporary folder
    plan = Plan.open(fleet / "a" / "build" / "loadplan" / "one@tp2.loadplan")
    assert str(fleet).encode() not in plan.to_bytes()
