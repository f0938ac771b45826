"""Checkpoints that an operator has named: restored from, never resumed from, never pruned.

They lie beside the others, in `named-checkpoints/NAME`, and count for nothing: no commit names them, and the
log is trimmed without a look at them. Each takes the disk of a checkpoint until its folder is removed.
"""

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from penstock.learner.checkpoint.store import Checkpoint, CheckpointStore
from penstock.protocol.ids import check_id

FOLDER: Final = "named-checkpoints"
MAX_NAMED: Final = 32
"""The bound on a run's disk: as many checkpoints beside those that are resumed from."""
_COMMAND: Final = "command"
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class NameRefused(Exception):
    """Reports a name that is taken, or that no checkpoint has; the message names the remedy."""


class NoRoom(Exception):
    """Reports that one more named checkpoint is not allowed, or does not fit; the message says which."""


class NamedCheckpoints:
    """The folder of a run. One process writes it: the holder of the lease."""

    def __init__(self, run_dir: Path) -> None:
        self._directory = run_dir / FOLDER

    def names(self) -> list[str]:
        """Return the names there are, sorted."""
        return sorted(self._store().ids()) if self._directory.is_dir() else []

    def keep(self, name: str, command: str, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Store a checkpoint under a name; it then survives loss of power.

        A command that was interrupted behind this and is followed again finds what it has stored.

        Args:
            name: an id.
            command: request id of the command that names it.
            tensors: of the algorithm, by path, of any shape and dtype.
            state: JSON object, as in any checkpoint.

        Raises:
            NameRefused: another command has given the name to a checkpoint.
            NoRoom: MAX_NAMED have names, or the disk is full.
        """
        names = self.names()
        if check_id("name", name) in names:
            if self._read(name).state.get(_COMMAND) != command:
                raise NameRefused(
                    f"name={name!r}: a checkpoint has it already; choose another, or remove "
                    f"{self._directory / name}"
                )
            return
        if len(names) >= MAX_NAMED:
            raise NoRoom(
                f"{len(names)} checkpoints have names, at most {MAX_NAMED} may: remove a folder from "
                f"{self._directory}"
            )
        try:
            self._store().write(name, tensors, {**state, _COMMAND: command})
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise NoRoom(f"{self._directory}: {error.strerror}; make room") from error

    def read(self, name: str) -> Checkpoint:
        """Return the checkpoint of a name.

        Raises NameRefused, with the names there are, for another name; Damaged where it is not whole.
        """
        names = self.names()
        if name not in names:
            raise NameRefused(f"name={name!r}: no checkpoint has it; there are: {', '.join(names) or 'none'}")
        return self._read(name)

    def _read(self, name: str) -> Checkpoint:
        return self._store().read(name)

    def _store(self) -> CheckpointStore:
        return CheckpointStore(self._directory, keep=MAX_NAMED)
