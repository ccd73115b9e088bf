"""Ed25519 keys in PEM files, and signatures by them: who vouches for a plan, an artifact or an entry of a cache.

A key is known by the SHA-256 of its 32 public bytes. What is signed begins with the name of its purpose, so that no
signature can be taken for one of something else. This is the one module that knows the library (`cryptography`, extra
`sign`), and it imports it when a key is first used.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from loadplan.cache.digest import digest_bytes
from loadplan.cache.error import LoadplanError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

logger = logging.getLogger(__name__)

PUBLIC_SUFFIX = ".pub.pem"
PRIVATE_SUFFIX = ".pem"
_MAX_PEM_NBYTES = 4096  # a key takes about 120
_SIGNATURE = re.compile(r"[0-9a-f]{128}")  # 64 bytes (RFC 8032, 5.1.6)
_SHORT = 16  # hex digits of a key's id that people compare


class KeyFileError(LoadplanError, ValueError):
    """A file is not the key that it should be."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class KeyExists(LoadplanError, FileExistsError):
    """A new key would take the place of another file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.path = path

    def __str__(self) -> str:
        return f"{self.path}: is there already, and a key that is overwritten is lost; give another name"


class SigningLibraryMissing(LoadplanError, ImportError):
    """Signatures need a package that is not installed."""

    def __str__(self) -> str:
        return "signatures need cryptography, which is not installed; run pip install 'loadplan[sign]'"


@dataclass(frozen=True, slots=True)
class PublicKey:
    """Whose signatures can be checked."""

    raw: bytes  # 32 bytes (RFC 8032, 5.1.5)

    @property
    def id(self) -> str:
        """SHA-256 (hex) of the key: its name in signatures."""
        return digest_bytes(self.raw)

    @property
    def short_id(self) -> str:
        """As much of the id as people compare."""
        return self.id[:_SHORT]

    def verifies(self, purpose: str, message: bytes, signature: bytes) -> bool:
        """Whether `signature` is this key's, of `message` for `purpose`. Raises `SigningLibraryMissing`."""
        _need_library()
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        try:
            Ed25519PublicKey.from_public_bytes(self.raw).verify(signature, _framed(purpose, message))
        except InvalidSignature:
            return False
        return True

    def to_pem(self) -> bytes:
        """The key as a PEM file. Raises `SigningLibraryMissing`."""
        _need_library()
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        key = Ed25519PublicKey.from_public_bytes(self.raw)
        return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


class SigningKey:
    """A private key. It signs, and says nothing else of itself."""

    __slots__ = ("_key", "public")

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public = PublicKey(key.public_key().public_bytes_raw())

    def sign(self, purpose: str, message: bytes) -> bytes:
        """The signature (64 bytes) of `message` for `purpose`."""
        return self._key.sign(_framed(purpose, message))


@dataclass(frozen=True, slots=True)
class TrustedKeys:
    """The public keys whose signatures count."""

    keys: tuple[PublicKey, ...]

    @classmethod
    def read(cls, places: Iterable[str | Path]) -> TrustedKeys:
        """The keys in files, and in all files of folders (those with a leading dot apart).

        Raises:
            KeyFileError: a file is no public key, a folder has none, or no place is given.
            OSError: a place cannot be read.
            SigningLibraryMissing
        """
        found: dict[str, PublicKey] = {}
        for place in map(Path, places):
            paths = [place]
            if place.is_dir():
                paths = sorted(path for path in place.iterdir() if not path.name.startswith("."))
                if not paths:
                    raise KeyFileError(place, "has no key files; put the public keys that are trusted there")
            for path in paths:
                key = read_public_key(path)
                found[key.id] = key
        if not found:
            raise KeyFileError(Path(), "no trusted key is given; name files or folders of public keys")
        return cls(tuple(found[name] for name in sorted(found)))

    def __str__(self) -> str:
        return ", ".join(key.short_id for key in self.keys)


def new_key(name: Path) -> tuple[SigningKey, Path, Path]:
    """A new key, in `NAME.pem` (for its owner's eyes only) and `NAME.pub.pem`; the key and both paths.

    Raises:
        KeyExists: one of the files is there.
        OSError: they cannot be written.
        SigningLibraryMissing
    """
    _need_library()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    private, public = (name.with_name(name.name + suffix) for suffix in (PRIVATE_SUFFIX, PUBLIC_SUFFIX))
    if os.path.lexists(public):
        raise KeyExists(public)
    key = Ed25519PrivateKey.generate()
    signing = SigningKey(key)
    _write_new(private, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), 0o600)
    _write_new(public, signing.public.to_pem(), 0o644)
    return signing, private, public


def _write_new(path: Path, data: bytes, mode: int) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    except FileExistsError as error:
        raise KeyExists(path) from error
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(descriptor)


def read_signing_key(path: str | Path) -> SigningKey:
    """The private key in the file at `path`.

    Raises:
        KeyFileError: it holds no Ed25519 private key, or an encrypted one.
        OSError: it cannot be read.
        SigningLibraryMissing
    """
    _need_library()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    place = Path(path)
    data = _read_pem(place)
    if b"PUBLIC KEY" in data:
        raise KeyFileError(place, "holds a public key, which cannot sign; give the private key")
    try:
        key = load_pem_private_key(data, password=None)
    except TypeError as error:
        raise KeyFileError(place, "the key is encrypted, and nobody can be asked; give one without password") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise KeyFileError(place, "is no private key in PEM form; `loadplan key new` makes one") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise KeyFileError(place, f"holds a {type(key).__name__}; only Ed25519 is used: `loadplan key new` makes one")
    if place.stat().st_mode & 0o077:
        logger.warning("%s: others may read this private key; run chmod 600 on it", place)
    return SigningKey(key)


def read_public_key(path: str | Path) -> PublicKey:
    """The public key in the file at `path`: that, and nothing beside it.

    Raises:
        KeyFileError: it holds anything else.
        OSError: it cannot be read.
        SigningLibraryMissing
    """
    _need_library()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    place = Path(path)
    data = _read_pem(place)
    if b"PRIVATE KEY" in data:
        raise KeyFileError(place, f"holds a private key; trust the public one (NAME{PUBLIC_SUFFIX}), and hide this")
    try:
        key = load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise KeyFileError(place, "is no public key in PEM form") from error
    if not isinstance(key, Ed25519PublicKey):
        raise KeyFileError(place, f"holds a {type(key).__name__}; only Ed25519 is used")
    found = PublicKey(key.public_bytes_raw())
    if found.to_pem().split() != data.split():
        raise KeyFileError(place, "holds more than one public key; give each a file of its own")
    return found


def _read_pem(path: Path) -> bytes:
    with path.open("rb") as file:
        data = file.read(_MAX_PEM_NBYTES + 1)
    if len(data) > _MAX_PEM_NBYTES:
        raise KeyFileError(path, f"is larger than {_MAX_PEM_NBYTES} bytes, and no key is")
    return data


def parse_signature(text: str) -> bytes | None:
    """The signature that `text` is the hex of; None if it is anything else. One signature has one text."""
    return bytes.fromhex(text) if _SIGNATURE.fullmatch(text) else None


def _framed(purpose: str, message: bytes) -> bytes:
    return purpose.encode() + b"\0" + message


def _need_library() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise SigningLibraryMissing from error
