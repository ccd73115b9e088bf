"""Plans and artifacts that must be signed: nothing is loaded that a trusted key did not vouch for, to the last byte."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from builders import raw, write_file, write_shards
from keys import private_key, write_private, write_public
from torch import nn

from loadplan.cache.digest import digest_bytes
from loadplan.cache.signing import TrustedKeys, read_signing_key
from loadplan.compiler.cli import main
from loadplan.compiler.conversion import convert
from loadplan.compiler.pipeline import compile_plan
from loadplan.compiler.target import Target
from loadplan.runtime import (
    Artifact,
    BadRequirement,
    FileMismatch,
    Plan,
    PlanError,
    SignatureFileError,
    UntrustedPlan,
    load_into,
    load_state_dict,
    save_checkpoint,
)
from loadplan.runtime.signature_file import PlanSignature, read_signatures, sign_plan, write_signatures
from loadplan.runtime.trust import find_requirements

SHARDS = {
    "a.safetensors": {"w": raw("F32", 4, 6), "n": raw("BF16", 3)},
    "b.safetensors": {"v": raw("F32", 2, 4)},
}


@pytest.fixture(autouse=True)
def _no_requirement(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOADPLAN_REQUIRE_SIGNED", "LOADPLAN_TRUSTED_KEYS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_shards(tmp_path / "model", SHARDS)


@pytest.fixture
def plan(tmp_path: Path, checkpoint: Path) -> Path:
    compile_plan(checkpoint).save(tmp_path / "m.loadplan")
    return tmp_path / "m.loadplan"


@pytest.fixture
def artifact(tmp_path: Path, checkpoint: Path, plan: Path) -> Path:
    convert(plan, checkpoint, tmp_path / "artifact")
    return tmp_path / "artifact"


@pytest.fixture
def trusted(tmp_path: Path) -> Path:
    return write_public(tmp_path, "ci")


def sign(place: Path, key: str = "ci", checkpoint: Path | None = None) -> None:
    more = [] if checkpoint is None else ["--checkpoint", str(checkpoint)]
    private = write_private(place.parent, key)
    assert main(["sign", str(place), "--key", str(private), *more]) == 0


def flip(path: Path, place: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8))


def test_nothing_need_be_signed(plan: Path, artifact: Path, checkpoint: Path) -> None:
    assert Plan.open(plan).vouched is None
    assert_same(load_state_dict(artifact), load_state_dict(plan, checkpoint))


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_a_signed_artifact_loads(
    artifact: Path, trusted: Path, by: str, plan: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = load_state_dict(plan, checkpoint)
    sign(artifact)
    if by == "argument":
        opened = Artifact.open(artifact, trusted)
    else:
        monkeypatch.setenv("LOADPLAN_REQUIRE_SIGNED", "1")
        monkeypatch.setenv("LOADPLAN_TRUSTED_KEYS", str(trusted))
        opened = Artifact.open(artifact)
        assert_same(load_state_dict(artifact), wanted)
        assert_same(load_state_dict(artifact / "artifact.loadplan"), wanted)
    assert opened.plan.vouched is not None
    assert [key.raw for key in opened.plan.vouched.keys] == [private_key("ci").public_key().public_bytes_raw()]
    for mode in ("auto", "map", "read", "copy"):
        assert_same(load_state_dict(opened, mode=mode), wanted)


def test_a_signed_plan_loads_what_was_signed(plan: Path, checkpoint: Path, trusted: Path) -> None:
    wanted = load_state_dict(plan, checkpoint)
    sign(plan, checkpoint=checkpoint)
    assert_same(load_state_dict(Plan.open(plan, trusted), checkpoint), wanted)
    flip(checkpoint / "b.safetensors")
    load_state_dict(plan, checkpoint)  # nobody asks
    with pytest.raises(FileMismatch, match=r"b\.safetensors: holds [0-9a-f]{12}, what was signed is"):
        load_state_dict(Plan.open(plan, trusted), checkpoint)


def test_a_plan_from_headers_says_nothing_of_contents(plan: Path, checkpoint: Path, trusted: Path) -> None:
    """A signature of the plan alone would be hollow."""
    sign(plan)
    with pytest.raises(UntrustedPlan, match=r"nobody signed what 'a\.safetensors' holds.* sign it with --checkpoint"):
        load_state_dict(Plan.open(plan, trusted), checkpoint)


def test_in_memory_plans_do_not_pass(
    plan: Path, checkpoint: Path, trusted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Plan.open(plan)
    monkeypatch.setenv("LOADPLAN_REQUIRE_SIGNED", "1")
    monkeypatch.setenv("LOADPLAN_TRUSTED_KEYS", str(trusted))
    with pytest.raises(UntrustedPlan, match="was not opened from a signed file"):
        load_state_dict(opened, checkpoint)


OPENERS: dict[str, Callable[[Path, Path], object]] = {
    "Plan.open": lambda folder, key: Plan.open(folder / "artifact.loadplan", key),
    "Artifact.open": Artifact.open,
}


@pytest.mark.parametrize("opener", OPENERS)
def test_unsigned(artifact: Path, trusted: Path, opener: str) -> None:
    with pytest.raises(
        UntrustedPlan, match=r"artifact\.loadplan: is not signed, and must be; have one of .*`loadplan sign`"
    ):
        OPENERS[opener](artifact, trusted)


def test_unsigned_by_environment(
    artifact: Path, trusted: Path, plan: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOADPLAN_REQUIRE_SIGNED", "1")
    monkeypatch.setenv("LOADPLAN_TRUSTED_KEYS", str(trusted))
    for attempt in (
        lambda: load_state_dict(artifact),
        lambda: load_state_dict(plan, checkpoint),
        lambda: load_into(nn.Linear(1, 1), artifact),
        lambda: save_checkpoint({}, artifact, artifact.parent / "saved"),
    ):
        with pytest.raises(UntrustedPlan, match="is not signed, and must be"):
            attempt()


def test_unknown_signer(artifact: Path, trusted: Path) -> None:
    sign(artifact, "stranger")
    with pytest.raises(UntrustedPlan, match=r"is signed by [0-9a-f]{16}, whom nobody trusts here"):
        Artifact.open(artifact, trusted)
    sign(artifact)  # one good one is enough
    Artifact.open(artifact, trusted)
    assert len(read_signatures(artifact / "artifact.loadplan")) == 2


def test_a_signature_of_another_plan(
    tmp_path: Path, artifact: Path, trusted: Path, plan: Path, checkpoint: Path
) -> None:
    sign(plan, checkpoint=checkpoint)
    shutil.copy(tmp_path / "m.loadplan.sig", artifact / "artifact.loadplan.sig")
    with pytest.raises(UntrustedPlan, match=r"is plan [0-9a-f]{12}, and what was signed is"):
        Artifact.open(artifact, trusted)


def test_a_signature_that_claims_another_plan(artifact: Path, trusted: Path, plan: Path) -> None:
    """Digest or key put right by hand, signature kept."""
    sign(plan)
    (old,) = read_signatures(plan)
    digest = Plan.open(artifact / "artifact.loadplan").digest
    write_signatures(artifact / "artifact.loadplan", [PlanSignature(old.key, digest, {}, old.signature)])
    with pytest.raises(UntrustedPlan, match="is not right: plan or signature were changed"):
        Artifact.open(artifact, trusted)
    stranger = read_signing_key(write_private(artifact.parent, "stranger"))
    forged = sign_plan(stranger, digest, {})
    write_signatures(artifact / "artifact.loadplan", [PlanSignature(old.key, digest, {}, forged.signature)])
    with pytest.raises(UntrustedPlan, match="is not right"):
        Artifact.open(artifact, trusted)


def test_changed_file_lists(plan: Path, checkpoint: Path, trusted: Path) -> None:
    sign(plan, checkpoint=checkpoint)
    (old,) = read_signatures(plan)
    for files in ({}, {**old.files, "a.safetensors": "0" * 64}, {**old.files, "c": "0" * 64}):
        write_signatures(plan, [PlanSignature(old.key, old.plan, files, old.signature)])
        with pytest.raises(UntrustedPlan, match="is not right"):
            Plan.open(plan, trusted)


def test_every_byte_of_a_signed_plan(artifact: Path, trusted: Path) -> None:
    """Refused, or (bits that zstd leaves free) the plan that was signed."""
    sign(artifact)
    path = artifact / "artifact.loadplan"
    good, wanted = path.read_bytes(), Plan.open(path, trusted)
    for place in range(len(good)):
        data = bytearray(good)
        data[place] ^= 0x40
        path.write_bytes(data)
        try:
            found = Plan.open(path, trusted)
            sections = [found.section(rank) for rank in range(found.world_size)]
        except (PlanError, UntrustedPlan):
            continue
        assert (found.digest, found.head) == (wanted.digest, wanted.head)
        assert sections == [wanted.section(0)]


def test_every_byte_of_a_signed_file(artifact: Path, trusted: Path) -> None:
    """Sizes and headers stay right where data is changed: only the whole content tells."""
    sign(artifact)
    (file,) = artifact.glob("*.safetensors")
    size = file.stat().st_size
    for place in (*range(4096, size), 0, 100, size - 1):
        flip(file, place)
        with pytest.raises(FileMismatch):
            load_state_dict(Artifact.open(artifact, trusted))
        flip(file, place)
    load_state_dict(Artifact.open(artifact, trusted))


def test_the_digest_of_an_artifact_covers_its_files(artifact: Path) -> None:
    """What makes a signature of the plan enough: each file's content is in the head, whose digest is the plan's."""
    plan = Artifact.open(artifact).plan
    assert {file.name: file.content_digest for file in plan.head.files} == {
        path.name: digest_bytes(path.read_bytes()) for path in artifact.glob("*.safetensors")
    }


def test_only_the_files_of_the_rank_are_read(tmp_path: Path, trusted: Path) -> None:
    write_file(tmp_path / "m" / "m.safetensors", {"w": raw("F32", 4, 6), "n": raw("F32", 3)})
    target = Target(tp_size=2, tp_plan={"w": "rowwise"})
    artifact = tmp_path / "artifact"
    convert(compile_plan(tmp_path / "m", target=target), tmp_path / "m", artifact)
    sign(artifact)
    flip(artifact / "rank-1-of-2.safetensors")
    opened = Artifact.open(artifact, trusted)
    load_state_dict(opened, rank=0)
    with pytest.raises(FileMismatch, match=r"rank-1-of-2\.safetensors: holds"):
        load_state_dict(opened, rank=1)


def test_saving_goes_back_through_a_plan_that_was_signed_with_it(
    artifact: Path, trusted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sign(artifact)
    monkeypatch.setenv("LOADPLAN_REQUIRE_SIGNED", "1")
    monkeypatch.setenv("LOADPLAN_TRUSTED_KEYS", str(trusted))
    save_checkpoint(load_state_dict(artifact), artifact, tmp_path / "saved")
    for name in SHARDS:
        assert (tmp_path / "saved" / name).read_bytes() == (tmp_path / "model" / name).read_bytes()
    compile_plan(tmp_path / "model", target=Target(dtype="bfloat16")).save(artifact / "original.loadplan")
    with pytest.raises(FileNotFoundError, match="is not the plan that"):
        _ = Artifact.open(artifact).original


def test_two_that_contradict_each_other(plan: Path, checkpoint: Path, trusted: Path, tmp_path: Path) -> None:
    sign(plan, checkpoint=checkpoint)
    other = read_signing_key(write_private(tmp_path, "release"))
    (ours,) = read_signatures(plan)
    theirs = sign_plan(other, ours.plan, {"a.safetensors": "0" * 64})
    write_signatures(plan, [ours, theirs])
    Plan.open(plan, trusted)  # whoever trusts one of them hears no contradiction
    with pytest.raises(UntrustedPlan, match=r"two trusted keys say different contents of 'a\.safetensors'"):
        Plan.open(plan, [trusted, write_public(tmp_path, "release")])


def test_a_signature_file_that_is_none(artifact: Path, trusted: Path) -> None:
    (artifact / "artifact.loadplan.sig").write_bytes(b"signed")
    with pytest.raises(SignatureFileError):
        Artifact.open(artifact, trusted)
    assert Artifact.open(artifact).plan.vouched is None  # nobody asks


def test_both_requirements_hold(artifact: Path, trusted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An argument does not weaken what the machine's owner asks for."""
    monkeypatch.setenv("LOADPLAN_REQUIRE_SIGNED", "yes")
    monkeypatch.setenv("LOADPLAN_TRUSTED_KEYS", str(write_public(tmp_path, "owner")))
    sign(artifact)
    with pytest.raises(UntrustedPlan, match="whom nobody trusts here"):
        Artifact.open(artifact, trusted)
    sign(artifact, "owner")
    found = Artifact.open(artifact, trusted).plan.vouched
    assert found is not None and len(found.keys) == 2


def test_requirements(tmp_path: Path) -> None:
    keys = TrustedKeys.read([write_public(tmp_path, "a")])
    other = write_public(tmp_path, "b")
    for no in ("", "0", "no", "OFF", "false"):
        assert find_requirements(None, {"LOADPLAN_REQUIRE_SIGNED": no, "LOADPLAN_TRUSTED_KEYS": "/absent"}) == ()
    assert find_requirements(keys, {}) == (keys,)
    assert find_requirements([tmp_path / "a.pub.pem"], {}) == (keys,)
    places = os.pathsep.join(map(str, (tmp_path / "a.pub.pem", other)))
    (found,) = find_requirements(None, {"LOADPLAN_REQUIRE_SIGNED": "TRUE", "LOADPLAN_TRUSTED_KEYS": places})
    assert len(found.keys) == 2
    with pytest.raises(BadRequirement, match="neither yes nor no"):
        find_requirements(None, {"LOADPLAN_REQUIRE_SIGNED": "maybe"})
    with pytest.raises(BadRequirement, match="LOADPLAN_TRUSTED_KEYS names no key"):
        find_requirements(None, {"LOADPLAN_REQUIRE_SIGNED": "1"})
    with pytest.raises(ValueError, match="no trusted key is given"):
        find_requirements([], {})
