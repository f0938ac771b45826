"""Where models lie, and that they are read one at a time."""

import threading
from pathlib import Path
from typing import Final

from penstock.config.settings import ConfigurationError

LOADING: Final = threading.Lock()
"""transformers changes torch for the whole process while it reads a model.

Two threads at once leave it changed, and every model read later without its weights.
"""


def place_of(field: str, name: str) -> str:
    """A folder of this machine as an absolute path, or a hub's `NAME` or `OWNER/NAME` as it is.

    Raises ConfigurationError for a path that is not there, which the hub would call a malformed name.
    """
    folder = Path(name)
    if folder.exists():
        return str(folder.resolve())
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ConfigurationError(f"{field}={name!r}: there is no such folder")
    return name
