"""Key files and signatures, against the library itself and literal bytes."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa, x25519
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from keys import private_key, public_pem, write_private, write_public

from loadplan.cache.signing import (
    KeyExists,
    KeyFileError,
    PublicKey,
    TrustedKeys,
    new_key,
    read_public_key,
    read_signing_key,
)


def test_new_keys(tmp_path: Path) -> None:
    key, private, public = new_key(tmp_path / "ci")
    assert (private, public) == (tmp_path / "ci.pem", tmp_path / "ci.pub.pem")
    assert (private.stat().st_mode & 0o777, public.stat().st_mode & 0o777 & ~0o022) == (0o600, 0o644)
    assert read_signing_key(private).public == read_public_key(public) == key.public
    assert new_key(tmp_path / "other")[0].public != key.public
    signature = read_signing_key(private).sign("purpose", b"message")
    assert read_public_key(public).verifies("purpose", b"message", signature)


@pytest.mark.parametrize("name", ["ci.pem", "ci.pub.pem"])
def test_no_key_is_overwritten(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"precious")
    with pytest.raises(KeyExists, match="is there already"):
        new_key(tmp_path / "ci")
    assert (tmp_path / name).read_bytes() == b"precious"
    assert len(list(tmp_path.iterdir())) == 1


def test_the_key_of_a_literal_file(tmp_path: Path) -> None:
    """RFC 8032, 7.1, test 1: seed and public key; PEM as RFC 8410 has it."""
    path = tmp_path / "k.pem"
    path.touch(0o600)
    path.write_text(
        "-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQYDK2VwBCIEIJ1hsZ3v/VpguoRK9JLsLMREScVpezJpGXA7rAMcrn9g\n"
        "-----END PRIVATE KEY-----\n"
    )
    raw = bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")
    public = read_signing_key(path).public
    assert public == PublicKey(raw)
    assert (public.id, public.short_id) == (sha256(raw).hexdigest(), sha256(raw).hexdigest()[:16])
    assert repr(read_signing_key(path)).count("9d61") == 0


def test_what_is_signed(tmp_path: Path) -> None:
    """Checked by the library alone: the purpose, a zero byte, the message."""
    signature = read_signing_key(write_private(tmp_path, "a")).sign("loadplan test v1", b"message")
    private_key("a").public_key().verify(signature, b"loadplan test v1\0message")


def test_what_does_not_verify(tmp_path: Path) -> None:
    key = read_signing_key(write_private(tmp_path, "a"))
    signature = key.sign("purpose", b"message")
    assert key.public.verifies("purpose", b"message", signature)
    assert not key.public.verifies("purpos", b"emessage", signature)
    assert not key.public.verifies("purpose", b"messagf", signature)
    assert not PublicKey(private_key("b").public_key().public_bytes_raw()).verifies("purpose", b"message", signature)
    for bad in (b"", signature[:-1], signature + b"\0", bytes(64)):
        assert not key.public.verifies("purpose", b"message", bad)
    for place in range(64 * 8):
        flipped = bytearray(signature)
        flipped[place // 8] ^= 1 << place % 8
        assert not key.public.verifies("purpose", b"message", bytes(flipped))


def test_a_private_key_that_others_may_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_private(tmp_path, "a")
    read_signing_key(path)
    assert not caplog.records
    path.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        read_signing_key(path)
    assert "run chmod 600 on it" in caplog.text


def _rsa_public() -> bytes:
    key = rsa.generate_private_key(public_exponent=65537, key_size=1024)
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def _private(key: ec.EllipticCurvePrivateKey | x25519.X25519PrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


BAD_PUBLIC: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "is no public key in PEM form"),
    "text": (lambda: b"hello", "is no public key in PEM form"),
    "raw": (lambda: private_key("a").public_key().public_bytes_raw(), "is no public key in PEM form"),
    "large": (lambda: bytes(5000), "is larger than 4096 bytes"),
    "cut": (lambda: public_pem("a")[:60], "is no public key in PEM form"),
    "rsa": (_rsa_public, "holds a RSAPublicKey; only Ed25519 is used"),
    "two": (lambda: public_pem("a") + public_pem("b"), "more than one public key"),
    "prose": (lambda: b"trust me\n" + public_pem("a"), "more than one public key"),
    "private": (lambda: _private(x25519.X25519PrivateKey.generate()), "holds a private key; trust the public one"),
}


@pytest.mark.parametrize("kind", BAD_PUBLIC)
def test_what_is_no_public_key(tmp_path: Path, kind: str) -> None:
    make, says = BAD_PUBLIC[kind]
    path = tmp_path / "k.pem"
    path.write_bytes(make())
    with pytest.raises(KeyFileError) as caught:
        read_public_key(path)
    assert says in str(caught.value)
    with pytest.raises(KeyFileError):
        TrustedKeys.read([path])


def _encrypted() -> bytes:
    return private_key("a").private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))


BAD_PRIVATE: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "is no private key in PEM form"),
    "public": (lambda: public_pem("a"), "holds a public key, which cannot sign"),
    "encrypted": (_encrypted, "the key is encrypted"),
    "ec": (lambda: _private(ec.generate_private_key(ec.SECP256R1())), "only Ed25519 is used"),
    "x25519": (lambda: _private(x25519.X25519PrivateKey.generate()), "only Ed25519 is used"),
}


@pytest.mark.parametrize("kind", BAD_PRIVATE)
def test_what_is_no_signing_key(tmp_path: Path, kind: str) -> None:
    make, says = BAD_PRIVATE[kind]
    path = tmp_path / "k.pem"
    path.touch(0o600)
    path.write_bytes(make())
    with pytest.raises(KeyFileError) as caught:
        read_signing_key(path)
    assert says in str(caught.value)


def test_trusted_keys(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    folder.mkdir()
    write_public(folder, "a")
    write_public(folder, "b")
    (folder / ".hidden").write_bytes(b"no key")
    single = write_public(tmp_path, "c")
    found = TrustedKeys.read([folder, single, single])
    assert {key.raw for key in found.keys} == {private_key(n).public_key().public_bytes_raw() for n in "abc"}
    assert TrustedKeys.read([single, folder]) == found
    assert str(found) == ", ".join(sorted(key.short_id for key in found.keys))


def test_no_trusted_key_is_an_error(tmp_path: Path) -> None:
    """Each fault is one, for a list of trusted keys that is shorter than meant refuses too much, and nobody knows why."""
    with pytest.raises(KeyFileError, match="no trusted key is given"):
        TrustedKeys.read([])
    with pytest.raises(KeyFileError, match="has no key files"):
        TrustedKeys.read([tmp_path])
    with pytest.raises(FileNotFoundError):
        TrustedKeys.read([tmp_path / "absent"])
    write_public(tmp_path, "a")
    (tmp_path / "README").write_text("keys that we trust")
    with pytest.raises(KeyFileError, match=r"README: is no public key in PEM form"):
        TrustedKeys.read([tmp_path])


def test_the_library_is_optional(tmp_path: Path) -> None:
    """Nothing imports it before a key is used; without it, the error says what to install."""
    code = (
        "import sys; sys.modules['cryptography'] = None\n"
        "import loadplan.cache, loadplan.runtime\n"
        "from loadplan.cache.signing import SigningLibraryMissing, read_public_key\n"
        "try: read_public_key(sys.argv[1])\n"
        "except SigningLibraryMissing as error: print(error)"
    )
    path = write_public(tmp_path, "a")
    found = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert "run pip install 'loadplan[sign]'" in found.stdout
