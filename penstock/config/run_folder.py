"""A run's folder: its configuration file, and the lock of the launcher that has it in hand."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from penstock.config.settings import ConfigurationError

CONFIG_FILE: Final = "config.toml"
LOCK_FILE: Final = "launcher.lock"


@contextmanager
def held_folder(run_dir: Path) -> Iterator[None]:
    """Hold a run's folder, made if it is not there, while the block runs.

    Two launchers of one run would fence each other's learners off. The kernel lets go when this process ends.

    Raises ConfigurationError while another launcher holds it.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / LOCK_FILE).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(
                f"run_dir={run_dir}: another `penstock train` has this run in hand; stop it first"
            ) from None
        yield
