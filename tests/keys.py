"""Keys that are always the same ones, made by `cryptography` from literal seeds: nothing here uses loadplan."""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat


def private_key(name: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(name.encode().ljust(32, b"."))


def write_private(folder: Path, name: str) -> Path:
    """Write the private key called `name`; return its path."""
    path = folder / f"{name}.pem"
    path.touch(0o600)
    path.write_bytes(private_key(name).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return path


def public_pem(name: str) -> bytes:
    return private_key(name).public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def write_public(folder: Path, name: str) -> Path:
    """Write the public key called `name`; return its path."""
    path = folder / f"{name}.pub.pem"
    path.write_bytes(public_pem(name))
    return path
