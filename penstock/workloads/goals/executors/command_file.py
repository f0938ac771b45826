"""The file of goals that are commands, checked when it is read.

    folder = "/var/lib/goals"                       # where commands run, their own
    allow = ["/usr/bin/find"]                       # programs that may be started, by their whole path
    limit_s = 5.0
    output_bytes = 4096

    [[goal]]
    name = "remove_old_files"
    command = ["/usr/bin/find", "spool", "-mmin", "+60", "-delete"]

A command is a list of arguments that is started as it stands: no shell reads it, nothing is filled in.
"""

import os
import tomllib
from pathlib import Path
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.config.configuration_error import ConfigurationError
from penstock.workloads.goals.host.goal_names import NOTHING

_SHELLS: Final = frozenset(
    [
        "sh",
        "bash",
        "dash",
        "ash",
        "zsh",
        "ksh",
        "fish",
        "csh",
        "tcsh",
        "busybox",
        "env",
        "xargs",
        "sudo",
        "su",
    ]
)
"""Programs that start whatever their arguments say, so that a list of programs would allow anything."""

_Text = Annotated[str, Field(max_length=4096, pattern=r"^[^\x00]*$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class GoalCommand(_Strict):
    """A goal. safe: it may be tried now and then below an injector's threshold."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
    command: Annotated[tuple[_Text, ...], Field(min_length=1, max_length=64)]
    safe: bool = False


class CommandFile(_Strict):
    """What may be done, where, how long, and how much is kept of what it prints."""

    folder: Path
    allow: Annotated[tuple[str, ...], Field(min_length=1)]
    limit_s: Annotated[float, Field(gt=0, le=600)] = 5.0
    output_bytes: Annotated[int, Field(ge=0, le=2**20)] = 4096
    goal: Annotated[tuple[GoalCommand, ...], Field(min_length=1, max_length=64)]


def read_commands(path: Path) -> CommandFile:
    """Return a checked file; raises ConfigurationError that names the entry and what would do."""
    try:
        told = CommandFile.model_validate(tomllib.loads(path.read_text(encoding="utf-8-sig")))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ConfigurationError(f"{path}: {field}={str(first['input'])[:80]!r}: {first['msg']}") from error
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path}: cannot be read: {error}") from error
    for program in told.allow:
        _check_program(path, program)
    names = [goal.name for goal in told.goal]
    for goal in told.goal:
        if names.count(goal.name) > 1 or goal.name == NOTHING:
            raise ConfigurationError(f"{path}: goal.name={goal.name!r}: is taken; choose another")
        if goal.command[0] not in told.allow:
            raise ConfigurationError(
                f"{path}: goal {goal.name!r}: {goal.command[0]!r} is not among allow={list(told.allow)}"
            )
    _check_folder(path, told.folder)
    return told


def _check_program(path: Path, program: str) -> None:
    real = Path(program)
    if not real.is_absolute() or not real.is_file() or not os.access(real, os.X_OK):
        raise ConfigurationError(
            f"{path}: allow={program!r}: must be the whole path of a program that is there and can be started"
        )
    if real.name in _SHELLS or real.resolve().name in _SHELLS:
        raise ConfigurationError(
            f"{path}: allow={program!r}: starts whatever its arguments say; allow the program itself"
        )


def _check_folder(path: Path, folder: Path) -> None:
    if not folder.is_absolute() or not folder.is_dir() or folder.resolve() == Path("/"):
        raise ConfigurationError(
            f"{path}: folder={str(folder)!r}: must be the whole path of a folder that is there, not the root"
        )
