"""What a put in progress needs: blobs that no action names yet, and that gc must leave alone."""

import secrets
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from loadplan.cache.digest import is_digest
from loadplan.cache.record import find_record, format_record
from loadplan.cache.write_file import TEMPORARY_PREFIX, FolderNotWritable, finished_files, make_folder

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Claims:
    """One record a put at `folder/<random>`, there as long as the put lasts.

    Not synced: after a power cut there is no put in progress.
    """

    folder: Path

    @contextmanager
    def hold(self, digests: Collection[str]) -> Iterator[None]:
        """Claim the blobs as long as the block lasts: from its first line on, no gc takes them away for good."""
        make_folder(self.folder)
        name = secrets.token_hex(8)
        draft, path = self.folder / f"{TEMPORARY_PREFIX}{name}", self.folder / name
        try:
            try:
                draft.write_bytes(format_record({"format": FORMAT, "digests": sorted(set(digests))}))
                draft.rename(path)
            except OSError as error:
                raise FolderNotWritable(error.errno, error.strerror, str(self.folder)) from error
            yield
        finally:
            with suppress(OSError):
                path.unlink()
            with suppress(OSError):
                draft.unlink()

    def held(self) -> set[str]:
        """All digests that are claimed, by puts that are gone too: who must not miss one cannot tell."""
        found: set[str] = set()
        for path in self.paths():
            found.update(parse_claim(find_record(path)))
        return found

    def paths(self) -> list[Path]:
        """Where claims lie, of puts in progress and of killed ones."""
        return finished_files(self.folder)


def parse_claim(value: object) -> frozenset[str]:
    """The digests in a claim; none when it says anything else."""
    match value:
        case {"format": 1, "digests": list(digests)}:
            return frozenset(filter(is_digest, digests))
        case _:
            return frozenset()
