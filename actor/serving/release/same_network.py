"""Whether weights of one run are weights of another run's network, too.

Runs of one policy may each have made, or copied, a base model of their own: it is the same where its files
are the same, wherever the folder lies.
"""

import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from penstock.protocol.specification import RunSpecification

_SAME_TEXT: Final = ("workload", "observation_space", "action_space")


def is_same_network(one: RunSpecification, other: RunSpecification) -> bool:
    """Return whether both describe the same network, as far as folders that they name can be read."""
    if any(getattr(one, name) != getattr(other, name) for name in _SAME_TEXT):
        return False
    try:
        return _is_same(json.loads(one.policy_json), json.loads(other.policy_json))
    except OSError:
        return False


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, str) and isinstance(other, str) and one != other:
        both = Path(one), Path(other)
        return all(path.is_absolute() and path.is_dir() for path in both) and _contents(*both)
    return bool(one == other)


@lru_cache(maxsize=64)
def _contents(one: Path, other: Path) -> bool:
    """Return whether two folders hold the same files; large ones are read once for each pair."""
    names = [{str(file.relative_to(folder)) for file in _files(folder)} for folder in (one, other)]
    return names[0] == names[1] and all(_digest(one / name) == _digest(other / name) for name in names[0])


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
