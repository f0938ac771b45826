"""A run's folder: its configuration file, who may read it, and the lock of the launcher that has it in hand.

What clients have shown and said lies in it: files are 0600 and the folder 0700, whatever the umask.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from penstock.config.settings import ConfigurationError

CONFIG_FILE: Final = "config.toml"
LOCK_FILE: Final = "launcher.lock"
_PRIVATE: Final = 0o077


def keep_private() -> None:
    """Let this process, and those that it starts, make files that only their user can read from now on."""
    os.umask(_PRIVATE)


def make_private(folder: Path) -> None:
    """Make a folder that only its user can read; one of this user's that is there becomes so."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid == os.geteuid():
        folder.chmod(0o700)


@contextmanager
def held_folder(run_dir: Path) -> Iterator[None]:
    """Hold a run's folder, made if absent, in the block: two launchers fence each other's learners."""
    keep_private()
    make_private(run_dir)
    with (run_dir / LOCK_FILE).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(
                f"run_dir={run_dir}: another `penstock train` has this run in hand; stop it first"
            ) from None
        yield
