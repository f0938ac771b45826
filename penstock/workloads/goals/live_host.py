"""Goals that are commands of a live host, and runs with them.

The injector carries these goals out; actors do so only with `actors_act`. Each goal is an argument list,
started without a shell, in its own session. At its time limit, and when it has ended, every process of that
session is killed. Output beyond a bounded beginning is read and dropped, so that much output neither blocks
the command nor fills memory.
"""

import os
import select
import signal
import subprocess
import threading
import time
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Annotated, Final

import psutil
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.config.configuration_error import ConfigurationError
from penstock.config.settings import EnvironmentSection, Progress, Rehearsal, Settings
from penstock.config.workload import load
from penstock.workloads.goals.host import NOTHING, Outcome, Readings, SimulatedHost

# ---- The file of goals that are commands, checked when it is read.

_SHELLS: Final = frozenset([
    "sh", "bash", "dash", "ash", "zsh", "ksh", "fish", "csh", "tcsh", "busybox", "env", "xargs", "sudo", "su",
])  # fmt: skip
"""Programs that start any program in their arguments, which a list of programs could not restrict."""

_Text = Annotated[str, Field(max_length=4096, pattern=r"^[^\x00]*$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class GoalCommand(_Strict):
    """A goal. safe: an injector may try it below its threshold (`--explore`)."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
    command: Annotated[tuple[_Text, ...], Field(min_length=1, max_length=64)]
    safe: bool = False


class CommandFile(_Strict):
    """The commands, their programs, their working folder, their time limit, and how much output is kept."""

    folder: Path
    allow: Annotated[tuple[str, ...], Field(min_length=1)]
    limit_s: Annotated[float, Field(gt=0, le=600)] = 5.0
    output_bytes: Annotated[int, Field(ge=0, le=2**20)] = 4096
    goal: Annotated[tuple[GoalCommand, ...], Field(min_length=1, max_length=64)]


def read_commands(path: Path) -> CommandFile:
    """Return a valid file; raises ConfigurationError that names the entry and what is allowed."""
    try:
        file = CommandFile.model_validate(tomllib.loads(path.read_text(encoding="utf-8-sig")))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ConfigurationError(f"{path}: {field}={str(first['input'])[:80]!r}: {first['msg']}") from error
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path}: cannot be read: {error}") from error
    for program in file.allow:
        _check_program(path, program)
    names = [goal.name for goal in file.goal]
    for goal in file.goal:
        if names.count(goal.name) > 1 or goal.name == NOTHING:
            raise ConfigurationError(f"{path}: goal.name={goal.name!r}: is used already; choose another")
        if goal.command[0] not in file.allow:
            raise ConfigurationError(
                f"{path}: goal {goal.name!r}: {goal.command[0]!r} is not among allow={list(file.allow)}"
            )
    _check_folder(path, file.folder)
    return file


def _check_program(path: Path, program: str) -> None:
    real = Path(program)
    if not real.is_absolute() or not real.is_file() or not os.access(real, os.X_OK):
        raise ConfigurationError(
            f"{path}: allow={program!r}: must be the absolute path of a program that can be started"
        )
    if real.name in _SHELLS or real.resolve().name in _SHELLS:
        raise ConfigurationError(
            f"{path}: allow={program!r}: starts any program in its arguments; allow that program itself"
        )


def _check_folder(path: Path, folder: Path) -> None:
    if not folder.is_absolute() or not folder.is_dir() or folder.resolve() == Path("/"):
        raise ConfigurationError(
            f"{path}: folder={str(folder)!r}: must be the absolute path of a folder that exists, not the root"
        )


# ---- Readings of this machine.


def read_host(folder: Path) -> Readings:
    """Return the load of this host and of the disk that holds `folder`."""
    now = time.localtime()
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    return Readings(
        cpu=min(load, 1.0),
        memory=psutil.virtual_memory().percent / 100,
        disk=psutil.disk_usage(str(folder)).percent / 100,
        processes=len(psutil.pids()) / 100,
        day=(now.tm_hour * 60 + now.tm_min) / 1440,
        weekday=now.tm_wday / 7,
    )


_PATH: Final = "/usr/local/bin:/usr/bin:/bin"
_LAST_WORDS_S: Final = 1.0
"""Seconds to wait for the output that a killed command has left in its pipe."""
_CHUNK: Final = 65_536


class NotAllowed(Exception):
    """A program is not on the list; nothing was started."""


class Commands:
    """Carries out the goals of a file that `read_commands` has returned."""

    def __init__(self, file: CommandFile, *, acts: bool) -> None:
        """acts: false: it has goals and readings, and refuses to begin an episode or a goal."""
        self._file, self._acts = file, acts
        self._commands: Mapping[str, Sequence[str]] = {one.name: one.command for one in file.goal}
        self.goals = tuple(self._commands)

    def reset(self, seed: int) -> None:
        """Begin an episode in the host's present state; raises ConfigurationError where it may not act."""
        self._check_acts()

    def read(self) -> Readings:
        return read_host(self._file.folder)

    def idle(self) -> None:
        """Do nothing: no command is started."""

    def carry_out(self, goal: str) -> Outcome:
        """Start the goal's command and wait for its end, at most `limit_s`."""
        self._check_acts()
        begun = time.monotonic()
        try:
            process = self._start(self._commands[goal])
        except OSError as error:
            return Outcome(success=False, took_s=time.monotonic() - begun, error=f"not started: {error}")
        output = _Output(process, self._file.output_bytes)
        try:
            in_time = _ends_within(process, self._file.limit_s)
        finally:
            _kill_session(process)
        took_s = time.monotonic() - begun
        text = output.text()
        if not in_time:
            return Outcome(success=False, took_s=took_s, output=text, error=f"above {self._file.limit_s:g} s")
        code = process.returncode
        return Outcome(success=code == 0, took_s=took_s, output=text, error=f"exit {code}" if code else "")

    def _check_acts(self) -> None:
        if not self._acts:
            raise ConfigurationError(
                "environment.kwargs.executor='commands': only `penstock inject` carries out goals of a live "
                "host; start the run with --actors 0 --serve ADDRESS, or let its actors carry them out with "
                "--set environment.kwargs.actors_act=true"
            )

    def _start(self, command: Sequence[str]) -> "subprocess.Popen[bytes]":
        if command[0] not in self._file.allow:
            raise NotAllowed(f"{command[0]!r} is not among {list(self._file.allow)}")
        return subprocess.Popen(
            list(command),
            executable=command[0],
            shell=False,
            cwd=self._file.folder,
            env={"PATH": _PATH, "HOME": str(self._file.folder), "LC_ALL": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


Executor = SimulatedHost | Commands
"""Carries goals out, one at a time."""


def _ends_within(process: "subprocess.Popen[bytes]", limit_s: float) -> bool:
    """Wait for a command's end without reaping it, so that no other process can get its id meanwhile."""
    handle = os.pidfd_open(process.pid)
    try:
        return bool(select.select([handle], [], [], limit_s)[0])
    finally:
        os.close(handle)


def _kill_session(process: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class _Output:
    """The beginning of a process's output, read by a thread until the pipe is closed."""

    def __init__(self, process: "subprocess.Popen[bytes]", most_bytes: int) -> None:
        assert process.stdout is not None
        self._kept, self._most = bytearray(), most_bytes
        self._thread = threading.Thread(target=self._read, args=(process.stdout,), daemon=True)
        self._thread.start()

    def _read(self, pipe: IO[bytes]) -> None:
        with pipe:
            while chunk := os.read(pipe.fileno(), _CHUNK):
                self._kept += chunk[: self._most - len(self._kept)]

    def text(self) -> str:
        self._thread.join(_LAST_WORDS_S)
        return bytes(self._kept).decode(errors="replace")


# ---- Runs of a live host.

SOLVED: Final = 24.5
"""Mean return that counts as solved on the simulated host: 0.95 of its optimum."""


def target(section: EnvironmentSection) -> float | None:
    """Return the mean return that counts as solved; for `Goals-v0` only the simulated host has one."""
    registered: float | None = load("penstock.workloads.control.environment:target")(section)
    return SOLVED if _has_goals(section) and not _is_live(section) else registered


def prepare(settings: Settings, folder: Path, progress: Progress) -> Settings:
    """Return the settings of a run; on a live host one environment acts at most, and none evaluates."""
    del folder, progress
    if not _is_live(settings.environment):
        return settings
    count, slots = settings.actor.count, settings.environment.count
    if count and settings.environment.kwargs.get("actors_act") is not True:
        raise ConfigurationError(
            f"actor.count={count}: actors would carry out goals on this host without the rules of `penstock "
            "inject`; say --actors 0 --serve ADDRESS, or --set environment.kwargs.actors_act=true"
        )
    if count * slots > 1:
        raise ConfigurationError(
            f"actor.count={count}, environment.count={slots}: several environments would act on one host at "
            "the same time; set both to 1"
        )
    return settings.model_copy(update={"evaluation": settings.evaluation.model_copy(update={"episodes": 0})})


def rehearse(settings: Settings, folder: Path, progress: Progress) -> Rehearsal:
    del folder, progress
    if _is_live(settings.environment):
        raise ConfigurationError(
            "--dry-run: environment.kwargs.executor='commands': the short run would carry out goals on this "
            "host; predict the run with environment.kwargs.executor='simulated'"
        )
    return Rehearsal(settings=settings)


def _has_goals(section: EnvironmentSection) -> bool:
    return section.id.rpartition(":")[2] == "Goals-v0"


def _is_live(section: EnvironmentSection) -> bool:
    return _has_goals(section) and section.kwargs.get("executor", "simulated") != "simulated"
