"""Where models lie, what of them is data, and that they are read one at a time."""

import json
import shutil
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from penstock.config.settings import ConfigurationError
from penstock.workloads.language.settings import told_as

LOADING: Final = threading.Lock()
"""transformers changes torch for the whole process while it reads a model.

Two threads at once leave it changed, and every model read later without its weights.
"""


def place_of(field: str, name: str) -> str:
    """Return a folder of this machine as an absolute path, or a hub's `NAME` or `OWNER/NAME` as it is."""
    folder = Path(name)
    if folder.exists():
        return str(folder.resolve())
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ConfigurationError(f"{field}={name!r}: there is no such folder; name one that is there")
    return name


@contextmanager
def reading(field: str, name: str, what: str, *more: type[Exception]) -> Iterator[None]:
    """Raise ConfigurationError where transformers cannot read a model. what: to say of it."""
    kinds: tuple[type[Exception], ...] = (OSError, ValueError, *more)
    try:
        yield
    except kinds as error:
        if Path(name).exists():
            raise ConfigurationError(f"{field}={name!r}: {what}: {error}") from error
        cause = str(error).partition("\n")[0]
        raise ConfigurationError(
            f"{field}={name!r}: {what}: there is no such folder, and the hub gave no model of this name "
            f"({cause}); name a folder that is there, or a model of the hub that this machine can read"
        ) from error


def check_adapter(folder: Path) -> None:
    """Raise ConfigurationError for an adapter's folder whose weights or settings could run code.

    peft unpickles an `adapter_model.bin` where the safetensors are absent, and imports the module that
    `megatron_core` names where `megatron_config` is set.
    """
    if not (folder / "adapter_model.safetensors").exists():
        found = "adapter_model.bin, which is a pickle" if (folder / "adapter_model.bin").exists() else "none"
        raise ConfigurationError(
            f"{folder}: an adapter needs adapter_model.safetensors; found: {found}; save it again with "
            "save_pretrained(…, safe_serialization=True)"
        )
    with told_as(f"{folder / 'adapter_config.json'}: not JSON", ValueError):
        said = json.loads((folder / "adapter_config.json").read_text())
    if not isinstance(said, dict) or said.get("megatron_config"):
        raise ConfigurationError(
            f"{folder / 'adapter_config.json'}: its megatron_config names a module to import: remove it"
        )


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Give another name to write a folder under; it is moved when all of it is there."""
    temporary = folder.with_suffix(".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    yield temporary
    temporary.rename(folder)


def quieten() -> None:
    """Keep progress bars and warnings that transformers writes to stderr away from our logs."""
    from transformers.utils import logging  # noqa: PLC0415 - only where a model is read

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")


# ---- Where a language model computes, by its name in a configuration.


def device_of(name: str) -> str:
    """Return a device as torch names it. name: that of one, or "auto": a GPU where there is one."""
    import torch  # noqa: PLC0415 - what prepares a run loads it only where it makes a model

    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
