"""Trains from Python as `penstock train` does from a shell: processes, and the folder of a run.

    from penstock.training import TrainingConfig, start

    job = start(TrainingConfig("CartPole-v1", settings={"learner": {"total_steps": 100_000}}))
    print(job.result().mean_return)

A run outlives the program that started it: its folder holds all of its state, and `penstock train --resume
FOLDER` continues it. The calling program loads no part of a learner.
"""

import json
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import tomli_w

__all__ = ["Job", "TrainingConfig", "TrainingFailed", "TrainingResult", "estimate", "resume", "start"]

_RUNS: Final = Path("runs")
_OF_TOML: Final = (bool, int, float, str)
_SUCCESS: Final = frozenset({0, 130})


class TrainingFailed(Exception):
    """A training could not begin, or failed; the message is the cause."""


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """What to train.

    what: a Gymnasium id, or the file of a recipe. settings: override those of the recipe, nested as in TOML.
    run_dir: folder of the run; None: a new one below `runs`.
    """

    what: str | Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    run_dir: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """The result of a training that has ended.

    mean_return: of the last evaluation; None: the run was not evaluated. interrupted: the training was
    stopped before it was done. summary: the content of `summary.json`.
    """

    run_dir: Path
    solved: bool
    interrupted: bool
    mean_return: float | None
    updates: int | None
    env_steps: int | None
    summary: Mapping[str, Any]


class Job:
    """A training in a process of its own. run_dir: folder of the run."""

    def __init__(self, process: "subprocess.Popen[bytes]", run_dir: Path, scratch: Path) -> None:
        self.run_dir = run_dir
        self._process = process
        self._scratch = scratch
        self._output: tuple[bytes, str] | None = None

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        """Stop the training after a checkpoint; `result` waits for the end."""
        if self.is_running:
            self._process.send_signal(signal.SIGTERM)

    def result(self, timeout_s: float | None = None) -> TrainingResult:
        """Wait for the end of the training and return its result.

        Raises TimeoutError after `timeout_s` seconds, which does not stop the training, and TrainingFailed.
        """
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"the training has not ended after {timeout_s:g} s") from error
        if self._output is None:
            self._output = (self._scratch / "out.json").read_bytes(), _last_line(self._scratch / "err.log")
            shutil.rmtree(self._scratch)
        summary, cause = self._output
        if code not in _SUCCESS or not summary:
            raise TrainingFailed(cause or f"it ended with exit code {code}")
        return _result(self.run_dir, json.loads(summary))


def start(config: TrainingConfig) -> Job:
    """Start a training and return at once.

    Raises OSError and ValueError for a recipe that cannot be read, TypeError for a setting that TOML cannot
    hold.
    """
    name = f"{Path(config.what).stem.lower()}-{secrets.token_hex(3)}"
    run_dir = (config.run_dir or _RUNS / name).absolute()
    return _job(run_dir, lambda scratch: _begin(config, run_dir, scratch))


def resume(run_dir: Path) -> Job:
    """Continue the run of a folder, as `penstock train --resume`, and return at once; raises OSError."""
    return _job(run_dir.absolute(), lambda scratch: _penstock(run_dir, run_dir, scratch, "--resume"))


def _job(run_dir: Path, begin: "Callable[[Path], subprocess.Popen[bytes]]") -> Job:
    scratch = Path(tempfile.mkdtemp(prefix="penstock-"))
    try:
        return Job(begin(scratch), run_dir, scratch)
    except BaseException:
        shutil.rmtree(scratch)
        raise


def estimate(config: TrainingConfig) -> dict[str, Any]:
    """Return what a training would take, as `penstock train --dry-run --json` reports it.

    Trains for some seconds in a temporary folder. Raises TrainingFailed, and OSError and ValueError for a
    recipe that cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-") as made:
        scratch = Path(made)
        process = _begin(config, scratch / "run", scratch, "--dry-run")
        process.wait()
        output = (scratch / "out.json").read_bytes()
        if not output:
            raise TrainingFailed(_last_line(scratch / "err.log"))
        return dict(json.loads(output))


def _begin(config: TrainingConfig, run_dir: Path, scratch: Path, *words: str) -> "subprocess.Popen[bytes]":
    is_file, what = str(config.what).endswith(".toml"), Path(config.what)
    content = tomllib.loads(what.read_text()) if is_file else {"environment": {"id": str(config.what)}}
    lay_over(content, config.settings)
    recipe = scratch / "job.toml"
    recipe.write_text(tomli_w.dumps(content))
    return _penstock(recipe, run_dir, scratch, *words)


def _penstock(what: Path, run_dir: Path, scratch: Path, *words: str) -> "subprocess.Popen[bytes]":
    command: Sequence[str] = (sys.executable, "-P", "-m", "penstock.launch.cli", "train", str(what))
    with (scratch / "out.json").open("wb") as out, (scratch / "err.log").open("wb") as err:
        return subprocess.Popen(
            [*command, "--run-dir", str(run_dir), "--json", *words],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )


def lay_over(below: dict[str, Any], above: Mapping[str, Any], name: str = "") -> None:
    """Put the values of `above` into `below`, table by table, also into `kwargs`; None takes a value out.

    name: of the table, with a dot behind it. Raises TypeError that names a value that TOML cannot hold.
    """
    for key, value in above.items():
        if not isinstance(key, str):
            raise TypeError(f"{name}{key!r}: is no name of a setting; give a text")
        if isinstance(value, Mapping):
            if not isinstance(below.get(key), dict):
                below[key] = {}
            lay_over(below[key], value, f"{name}{key}.")
        elif value is None:
            below.pop(key, None)
        else:
            below[key] = _plain(f"{name}{key}", value)


def _plain(name: str, value: Any) -> Any:
    """Return a value as TOML holds it: numbers of numpy as Python's, paths as text."""
    if isinstance(value, Path):
        return str(value)
    if not isinstance(value, _OF_TOML) and hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(name, one) for one in value]
    if isinstance(value, Mapping):
        below: dict[str, Any] = {}
        lay_over(below, value, f"{name}.")
        return below
    if not isinstance(value, _OF_TOML):
        raise TypeError(f"{name}={value!r}: is no number, text or truth value; give one of them, or a list")
    return value


def _result(run_dir: Path, summary: Mapping[str, Any]) -> TrainingResult:
    if "failure" in summary:
        raise TrainingFailed(str(summary["failure"]))
    return TrainingResult(
        run_dir=run_dir,
        summary=summary,
        **{name: summary[name] for name in ("solved", "interrupted", "mean_return", "updates", "env_steps")},
    )


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else ""
