"""Signed entries of a cache: whoever built an artifact vouches for "this key leads to these blobs".

The signatures are notes of the entry (`signature:KEY-ID` -> hex), so they go wherever the entry goes, through every
kind of remote. Each is of the action key, all blobs by name, and all other notes: an entry that was changed, or filed
under another key, has none that is right. Blobs are named by their digest, so what is signed is their bytes.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from loadplan.cache.digest import NotCanonical, canonical_json
from loadplan.cache.error import LoadplanError
from loadplan.cache.signing import SigningKey, TrustedKeys, parse_signature

logger = logging.getLogger(__name__)

PURPOSE = "loadplan action v1"
PREFIX = "signature:"


class ReservedNote(LoadplanError, ValueError):
    """A note of an artifact is called like a signature."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name

    def __str__(self) -> str:
        return f"artifact: the note {self.name!r} is called as signatures are; call it otherwise"


@dataclass(frozen=True, slots=True, eq=False)
class EntryTrust:
    """Whose entries are believed, and who signs ours.

    A cache that believes signed entries only, and has no signer, does not find again what it built itself.
    """

    trusted: TrustedKeys | None = None  # None: entries need no signature
    signer: SigningKey | None = None
    _said: set[str] = field(default_factory=set)  # keys of entries that were warned of

    def signature_notes(self, key: str, blobs: Mapping[str, str], info: Mapping[str, str]) -> dict[str, str]:
        """`info` of an entry that was just built, with our signature if we have a signer.

        Raises:
            ReservedNote: a note is called like a signature.
        """
        for name in info:
            if name.startswith(PREFIX):
                raise ReservedNote(name)
        if self.signer is None:
            return dict(info)
        signature = self.signer.sign(PURPOSE, _message(key, blobs, info))
        return {**info, PREFIX + self.signer.public.id: signature.hex()}

    def accepts(self, key: str, blobs: Mapping[str, str], info: Mapping[str, str], place: str = "the cache") -> bool:
        """Whether the entry may be used: a trusted key signed it, or none need have. Warns once of each that may not."""
        if self.trusted is None or _is_signed(key, blobs, info, self.trusted):
            return True
        level = logging.DEBUG if key in self._said else logging.WARNING
        self._said.add(key)
        count = sum(name.startswith(PREFIX) for name in info)
        why = f"none of its {count} signatures is right and by a trusted key" if count else "it is not signed"
        logger.log(level, "action %s in %s: %s (trusted: %s); it is not used", key[:12], place, why, self.trusted)
        return False


def _is_signed(key: str, blobs: Mapping[str, str], info: Mapping[str, str], trusted: TrustedKeys) -> bool:
    rest = {name: note for name, note in info.items() if not name.startswith(PREFIX)}
    try:
        message = _message(key, blobs, rest)
    except NotCanonical:  # nobody can have signed it
        return False
    for public in trusted.keys:
        signature = parse_signature(info.get(PREFIX + public.id, ""))
        if signature is not None and public.verifies(PURPOSE, message, signature):
            return True
    return False


def _message(key: str, blobs: Mapping[str, str], info: Mapping[str, str]) -> bytes:
    return canonical_json({"key": key, "blobs": dict(blobs), "info": dict(info)})
