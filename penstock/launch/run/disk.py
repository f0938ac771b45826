"""What lies in the folders of a run, and whether they can still be written.

A full disk is the one cause that no log can record.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from penstock.config.run_files import opener

_PROBE_BYTES: Final = 16 * 1024


def problem(folders: Iterable[Path]) -> str | None:
    """Why a small file cannot be written in one of these folders; None when it can in all that exist."""
    for folder in folders:
        probe = folder / f".probe-{os.getpid()}"
        try:
            with open(probe, "wb", opener=opener) as file:
                file.write(bytes(_PROBE_BYTES))
                file.flush()
                os.fsync(file.fileno())
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            return f"cannot write in {folder}: {error.strerror}"
        finally:
            with suppress(OSError):
                probe.unlink()
    return None


def explain(cause: str, run_dir: Path) -> str:
    """`cause`, behind what a full disk kept it from saying."""
    found = problem((run_dir, run_dir / "checkpoints", run_dir / "redis", run_dir / "logs"))
    return cause if found is None else f"{found}; make room, then resume ({cause})"


def sizes(folder: Path) -> dict[str, int]:
    """Bytes of everything in a folder, by name; nothing where there is none."""
    if not folder.is_dir():
        return {}
    return {entry.name: _size(entry) for entry in folder.iterdir()}


def _size(place: Path) -> int:
    files = [place] if place.is_file() else [file for file in place.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)
