"""Caches that believe signed entries only: what is changed, copied or unknown is a miss, here and from remotes."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from keys import private_key, write_private, write_public
from remote_places import Place, make_place

from loadplan.cache import Artifact, Cache, ReservedNote, SigningKey, TrustedKeys, digest_bytes
from loadplan.cache.entry_trust import EntryTrust
from loadplan.cache.record import format_record, parse_record, write_record
from loadplan.cache.signing import PublicKey, read_signing_key

KEY, OTHER_KEY = digest_bytes(b"key"), digest_bytes(b"other key")
CONTENTS = {"plan": b"a plan", "data": bytes(3000)}
INFO = {"seconds": "3"}


def id_of(name: str) -> str:
    return digest_bytes(private_key(name).public_key().public_bytes_raw())


@pytest.fixture
def signer(tmp_path: Path) -> SigningKey:
    return read_signing_key(write_private(tmp_path, "ci"))


@pytest.fixture
def trust(tmp_path: Path) -> TrustedKeys:
    return TrustedKeys.read([write_public(tmp_path, "ci"), write_public(tmp_path, "release")])


def stranger(tmp_path: Path) -> SigningKey:
    return read_signing_key(write_private(tmp_path, "stranger"))


def change_entry(cache: Cache, key: str, **fields: object) -> None:
    """Write the entry of `key` with other fields, and the right digest around them."""
    path = cache.actions.path(key)
    value = parse_record(path.read_bytes())
    assert isinstance(value, dict)
    write_record(path, {**value, **fields})


def info_of(cache: Cache, key: str) -> dict[str, str]:
    value = parse_record(cache.actions.path(key).read_bytes())
    assert isinstance(value, dict)
    return dict(value["info"])


def test_a_signed_entry_is_found(tmp_path: Path, signer: SigningKey, trust: TrustedKeys) -> None:
    built = Cache(tmp_path / "cache", signer=signer).put(KEY, CONTENTS, INFO)
    for reader in (Cache(tmp_path / "cache"), Cache(tmp_path / "cache", trust=trust)):
        assert reader.fetch(KEY) == CONTENTS
        assert reader.find(KEY) == reader.actions.find(KEY) == built
    assert list(built.info) == ["seconds", f"signature:{id_of('ci')}"]


def test_what_the_signature_is_of(tmp_path: Path, signer: SigningKey) -> None:
    """Literal bytes, checked by the library alone."""
    built = Cache(tmp_path / "cache", signer=signer).put(KEY, {"plan": b"x"}, {"why": "é"})
    message = f'{{"blobs":{{"plan":"{digest_bytes(b"x")}"}},"info":{{"why":"é"}},"key":"{KEY}"}}'.encode()
    signature = bytes.fromhex(built.info[f"signature:{id_of('ci')}"])
    private_key("ci").public_key().verify(signature, b"loadplan action v1\0" + message)


def test_an_unsigned_entry_is_a_miss_with_one_warning(
    tmp_path: Path, trust: TrustedKeys, caplog: pytest.LogCaptureFixture
) -> None:
    Cache(tmp_path / "cache").put(KEY, CONTENTS)
    cache = Cache(tmp_path / "cache", trust=trust)
    with caplog.at_level(logging.WARNING):
        assert [cache.find(KEY), cache.fetch(KEY), cache.actions.find(KEY)] == [None] * 3
    assert len(caplog.records) == 1
    assert f"action {KEY[:12]} in the cache: it is not signed" in caplog.text


def test_an_unknown_key_is_a_miss(tmp_path: Path, trust: TrustedKeys, caplog: pytest.LogCaptureFixture) -> None:
    Cache(tmp_path / "cache", signer=stranger(tmp_path)).put(KEY, CONTENTS)
    with caplog.at_level(logging.WARNING):
        assert Cache(tmp_path / "cache", trust=trust).fetch(KEY) is None
    assert "none of its 1 signatures is right and by a trusted key" in caplog.text


def test_built_again_by_a_signer(tmp_path: Path, signer: SigningKey, trust: TrustedKeys) -> None:
    Cache(tmp_path / "cache").put(KEY, {"plan": b"planted"})
    cache = Cache(tmp_path / "cache", trust=trust, signer=signer)
    assert cache.fetch(KEY) is None
    cache.put(KEY, CONTENTS)
    assert cache.fetch(KEY) == CONTENTS


def test_replay_under_another_key(tmp_path: Path, signer: SigningKey, trust: TrustedKeys) -> None:
    built = Cache(tmp_path / "cache", signer=signer).put(KEY, CONTENTS, INFO)
    Cache(tmp_path / "cache").actions.put(OTHER_KEY, built)
    reader = Cache(tmp_path / "cache", trust=trust)
    assert reader.fetch(OTHER_KEY) is None
    assert reader.fetch(KEY) == CONTENTS


def test_swapped_signatures(tmp_path: Path, signer: SigningKey, trust: TrustedKeys) -> None:
    cache = Cache(tmp_path / "cache", signer=signer)
    cache.put(KEY, CONTENTS, INFO)
    cache.put(OTHER_KEY, {"plan": b"other"}, INFO)
    reader = Cache(tmp_path / "cache", trust=trust)
    first, second = info_of(cache, KEY), info_of(cache, OTHER_KEY)
    change_entry(cache, KEY, info=second)
    assert reader.fetch(KEY) is None
    name = f"signature:{id_of('ci')}"
    change_entry(cache, KEY, info={"seconds": "3", f"signature:{id_of('release')}": first[name]})
    assert reader.fetch(KEY) is None
    change_entry(cache, KEY, info=first)
    assert reader.fetch(KEY) == CONTENTS


def test_changed_entries(tmp_path: Path, signer: SigningKey, trust: TrustedKeys) -> None:
    """With the digest of the record put right: only the signature tells."""
    cache = Cache(tmp_path / "cache", signer=signer)
    artifact = cache.put(KEY, CONTENTS, INFO)
    planted = cache.blobs.put_bytes(b"planted")
    reader = Cache(tmp_path / "cache", trust=trust)
    good = cache.actions.path(KEY).read_bytes()
    blobs, info, name = artifact.blobs, artifact.info, f"signature:{id_of('ci')}"
    for fields in (
        {"blobs": {**blobs, "plan": planted}},
        {"blobs": {**blobs, "more": planted}},
        {"blobs": {"plan": blobs["plan"]}},
        {"blobs": {"plan": blobs["data"], "data": blobs["plan"]}},
        {"info": {**info, "seconds": "4"}},
        {"info": {**info, "more": ""}},
        {"info": {name: info[name]}},
        {"info": {**info, name: info[name].upper()[:-2]}},
        {"info": {**info, name: "no hex"}},
        {"info": {**info, name: ""}},
        {"info": {**info, "\ud800": ""}},
    ):
        cache.actions.path(KEY).write_bytes(good)
        if "\ud800" in fields.get("info", {}):
            value = json.dumps({"format": 1, "key": KEY, "blobs": blobs, **fields}).encode()
            cache.actions.path(KEY).write_bytes(digest_bytes(value).encode() + b"\n" + value)
        else:
            change_entry(cache, KEY, **fields)
        assert reader.fetch(KEY) is None, fields
        assert Cache(tmp_path / "cache").fetch(KEY) is not None, fields
    cache.actions.path(KEY).write_bytes(good)
    assert reader.fetch(KEY) == CONTENTS


def test_every_bit_of_an_entry(tmp_path: Path, signer: SigningKey, trust: TrustedKeys) -> None:
    """With the record's own digest put right, so that nothing but the signature guards it; found only if it is equal."""
    cache = Cache(tmp_path / "cache", signer=signer)
    artifact = cache.put(KEY, {"plan": b"a plan"}, INFO)
    path = cache.actions.path(KEY)
    body = path.read_bytes().partition(b"\n")[2]
    quiet = logging.getLogger("loadplan.cache.entry_trust")
    before, quiet.disabled = quiet.disabled, True
    try:
        for place in range(len(body) * 8):
            flipped = bytearray(body)
            flipped[place // 8] ^= 1 << place % 8
            path.write_bytes(digest_bytes(flipped).encode() + b"\n" + flipped)
            found = Cache(tmp_path / "cache", trust=trust).actions.find(KEY)
            assert found is None or found == artifact, bytes(flipped)
    finally:
        quiet.disabled = before


def test_a_changed_blob(tmp_path: Path, signer: SigningKey, trust: TrustedKeys) -> None:
    cache = Cache(tmp_path / "cache", signer=signer)
    artifact = cache.put(KEY, CONTENTS)
    reader = Cache(tmp_path / "cache", trust=trust)
    path = cache.blobs.path(artifact.blobs["data"])
    path.unlink()
    path.write_bytes(b"\1" + bytes(2999))
    assert reader.find(KEY) is None
    assert reader.fetch(KEY) is None


def test_one_good_signature_is_enough(tmp_path: Path, signer: SigningKey, trust: TrustedKeys) -> None:
    cache = Cache(tmp_path / "cache", signer=signer)
    built = cache.put(KEY, CONTENTS, INFO)
    theirs = EntryTrust(None, stranger(tmp_path)).signature_notes(KEY, built.blobs, INFO)
    for more in (theirs, {f"signature:{id_of('release')}": "00" * 64}, {"signature:": "x"}):
        cache.actions.put(KEY, replace(built, info={**more, **built.info}))
        assert Cache(tmp_path / "cache", trust=trust).fetch(KEY) == CONTENTS


def test_notes_that_look_like_signatures(tmp_path: Path) -> None:
    with pytest.raises(ReservedNote, match="is called as signatures are"):
        Cache(tmp_path / "cache").put(KEY, CONTENTS, {"signature:x": ""})


@given(
    blobs=st.dictionaries(st.text(max_size=3), st.sampled_from([KEY, OTHER_KEY]), max_size=2),
    info=st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
    other_blobs=st.dictionaries(st.text(max_size=3), st.sampled_from([KEY, OTHER_KEY]), max_size=2),
    other_info=st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
    key=st.sampled_from([KEY, OTHER_KEY]),
)
def test_only_what_was_signed(
    blobs: dict[str, str], info: dict[str, str], other_blobs: dict[str, str], other_info: dict[str, str], key: str
) -> None:
    signer = SigningKey(private_key("ci"))
    trust = EntryTrust(TrustedKeys((PublicKey(signer.public.raw),)), signer)
    try:
        notes = trust.signature_notes(KEY, blobs, info)
    except (ReservedNote, TypeError):
        return
    signature = {name: text for name, text in notes.items() if name not in info}
    assert trust.accepts(KEY, blobs, notes)
    same = (key, other_blobs, other_info) == (KEY, blobs, info)
    assert trust.accepts(key, other_blobs, {**other_info, **signature}) is same


KINDS = ("directory", "memory", "bazel", "bazel-zstd")


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in ("LOADPLAN_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    with make_place(request.param, tmp_path) as found:
        yield found


def test_signatures_travel(place: Place, tmp_path: Path, signer: SigningKey, trust: TrustedKeys) -> None:
    source = Cache(tmp_path / "a", signer=signer)
    built = source.put(KEY, CONTENTS, INFO)
    source.push([KEY], place.open(False))
    target = Cache(tmp_path / "b", [place.open(True)], trust=trust)
    assert target.pull(KEY) == built
    assert target.fetch(KEY) == CONTENTS


def test_unsigned_entries_of_remotes_are_not_pulled(
    place: Place, tmp_path: Path, signer: SigningKey, trust: TrustedKeys, caplog: pytest.LogCaptureFixture
) -> None:
    """No blob of them is fetched; nor does a signing reader sign what it was given."""
    source = Cache(tmp_path / "a")
    source.put(KEY, CONTENTS, INFO)
    source.push([KEY], place.open(False))
    target = Cache(tmp_path / "b", [place.open(True)], trust=trust, signer=signer)
    with caplog.at_level(logging.WARNING):
        assert target.pull(KEY) is None
    assert len(caplog.records) == 1
    assert f"action {KEY[:12]} in {place.open(True).name}: it is not signed" in caplog.text
    assert not (tmp_path / "b").exists()
    reader = Cache(tmp_path / "c", [place.open(True)], signer=signer)  # believes everybody
    pulled = reader.pull(KEY)
    assert pulled is not None and dict(pulled.info) == INFO


def test_a_replay_on_a_remote(place: Place, tmp_path: Path, signer: SigningKey, trust: TrustedKeys) -> None:
    source = Cache(tmp_path / "a", signer=signer)
    built = source.put(KEY, CONTENTS, INFO)
    source.actions.put(OTHER_KEY, Artifact(built.blobs, built.info))
    source.push([KEY, OTHER_KEY], place.open(False))
    target = Cache(tmp_path / "b", [place.open(True)], trust=trust)
    assert target.pull(OTHER_KEY) is None
    assert target.pull(KEY) == built


def test_the_next_remote_is_asked(tmp_path: Path, signer: SigningKey, trust: TrustedKeys) -> None:
    with make_place("directory", tmp_path) as bad, make_place("memory", tmp_path) as good:
        planted = Cache(tmp_path / "a", signer=stranger(tmp_path))
        planted.put(KEY, {"plan": b"planted"})
        planted.push([KEY], bad.open(False))
        honest = Cache(tmp_path / "b", signer=signer)
        honest.put(KEY, CONTENTS)
        honest.push([KEY], good.open(False))
        target = Cache(tmp_path / "c", [bad.open(True), good.open(True)], trust=trust)
        assert target.pull(KEY) is not None
        assert target.fetch(KEY) == CONTENTS


def test_records_keep_their_form() -> None:
    """A signed entry is an entry like any other: format 1, read by loadplans that know of no signatures."""
    trust = EntryTrust(None, SigningKey(private_key("ci")))
    notes = trust.signature_notes(KEY, {}, {})
    value = {"format": 1, "key": KEY, "blobs": {}, "info": notes}
    assert parse_record(format_record(value)) == value
