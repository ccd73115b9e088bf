"""What doit remembers between runs, in a file that is whole or counts as absent: after any damage, doit only does more.

doit's own backends stop with an error when their file is damaged. This one is a plugin (entry point `doit.BACKEND`),
chosen by the `DOIT_CONFIG` of `tasks`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from loadplan.cache.record import find_record, write_record
from loadplan.cache.write_file import FolderNotWritable

STATE_NAME = ".loadplan/doit-state"  # relative to the folder of dodo.py, as doit runs there


class Codec(Protocol):
    """How doit turns the state of one task into text and back."""

    def encode(self, data: object) -> str: ...

    def decode(self, data: str) -> dict[str, object]: ...


class StateFile:
    """The state of all tasks, read at the start and written at the end. The methods are those that doit calls."""

    desc = "a file that survives damage"

    def __init__(self, name: str, codec: Codec, *, module_name: str | None = None) -> None:
        self.name = name
        self._codec = codec
        self._states = self._read()
        self._is_changed = False

    def _read(self) -> dict[str, dict[str, object]]:
        try:
            found = find_record(Path(self.name))
            tasks = found if isinstance(found, dict) else {}
            states = {str(task): self._codec.decode(text) for task, text in tasks.items()}
        except (OSError, ValueError, TypeError):  # another kind of file, or another version's
            return {}
        return {task: state for task, state in states.items() if isinstance(state, dict)}

    def dump(self) -> None:
        """Write what changed; a folder that cannot be written costs doit its memory, and nothing else."""
        if not self._is_changed:
            return
        try:
            write_record(Path(self.name), {task: self._codec.encode(state) for task, state in self._states.items()})
        except (FolderNotWritable, IsADirectoryError):
            return
        self._is_changed = False

    def set(self, task_id: str, dependency: str, value: object) -> None:
        """Note a value of a task."""
        self._states.setdefault(task_id, {})[dependency] = value
        self._is_changed = True

    def get(self, task_id: str, dependency: str) -> object:
        """A value of a task, or None."""
        return self._states.get(task_id, {}).get(dependency)

    def in_(self, task_id: str) -> bool:
        """Whether anything is noted of a task."""
        return task_id in self._states

    def remove(self, task_id: str) -> None:
        """Forget a task."""
        self._is_changed |= self._states.pop(task_id, None) is not None

    def remove_all(self) -> None:
        """Forget all tasks."""
        self._states = {}
        self._is_changed = True
