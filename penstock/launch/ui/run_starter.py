"""Starts trainings of a folder of runs, from settings that a person wrote in a browser.

A training is a process of its own, in a session of its own: it goes on when the page ends. What it was asked
for and its output lie in a folder of the page's state, `STARTS/NAME`, of the newest start of each name.
"""

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import tomli_w

from penstock.config.run_folder import make_private
from penstock.config.settings import ConfigurationError, load
from penstock.gateway.personal.shown_runs import CannotStart
from penstock.launch.inspection.observation import is_going_on
from penstock.launch.run.child_process import last_line, penstock, without_configuration
from penstock.launch.ui.settings_schema import settings_schema

WAIT_S: Final = 120.0
"""Seconds in which the run of a training that was started must be there."""
_LOOK_S: Final = 0.2


class RunStarter:
    """Starts trainings in `runs`. state: folder of what was asked for; is_run: whether a folder is one."""

    def __init__(self, runs: Path, state: Path, is_run: Callable[[Path], bool]) -> None:
        self._runs, self._state, self._is_run = runs, state, is_run
        self._children: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()

    def schema(self) -> Mapping[str, Any]:
        """Return the JSON schema of all settings."""
        return settings_schema()

    def start(self, name: str, settings: Mapping[str, Any]) -> None:
        """Start a training as the run `name`, and return once it is among the runs; raises CannotStart."""
        if self._is_run(self._runs):
            raise CannotStart("this is the folder of one run: start `penstock ui` on the folder above it")
        said = _checked({"run": name, **settings})
        run = self._runs / name
        with self._lock:  # of two that ask for one name the second finds the first one's folder
            self._children = [child for child in self._children if child.poll() is None]
            try:
                run.mkdir(mode=0o700)
            except FileExistsError:
                raise CannotStart("there is a run of this name: choose another", "name") from None
            except OSError as error:
                raise CannotStart(f"{self._runs.name}: {error.strerror}") from error
        try:
            self._begin(run, said)
        except OSError as error:
            raise CannotStart(f"it could not be started: {error.strerror}") from error

    def _begin(self, run: Path, settings: Mapping[str, Any]) -> None:
        place = self._state / "starts" / run.name
        make_private(place)
        recipe, log = place / "asked.toml", place / "train.log"
        recipe.write_text(tomli_w.dumps(settings))
        with log.open("wb") as out:
            child = subprocess.Popen(
                penstock("train", str(recipe), "--run-dir", str(run), "--json"),
                cwd=place,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=without_configuration(os.environ),
                start_new_session=True,
            )
        self._children.append(child)
        until_s = time.monotonic() + WAIT_S
        while not (self._is_run(run) and is_going_on(run)):
            try:
                code = child.wait(_LOOK_S)
            except subprocess.TimeoutExpired:
                if time.monotonic() > until_s:
                    raise CannotStart(f"its run is not there after {WAIT_S:g} s: look into {log}") from None
            else:
                if self._is_run(run):
                    return  # it was over before anybody looked: the page tells how
                shutil.rmtree(run, ignore_errors=True)  # made here, and never a run: the name is free again
                raise CannotStart(last_line(log) or f"it ended with exit code {code}")


def _checked(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings as they may be written; raises CannotStart that names the first wrong one."""
    try:
        unset = _null_in(settings, "")
        if unset is not None:
            raise CannotStart(
                f"{unset}: null is no value: leave out what shall be as it is", f"settings.{unset}"
            )
        load([settings])
    except RecursionError as error:
        raise CannotStart("the settings are nested too deeply: write them flatter", "settings") from error
    except ConfigurationError as error:
        told = str(error).splitlines()[0]
        key = told.partition("=")[0].partition(":")[0]
        raise CannotStart(told, f"settings.{key}") from error
    return dict(settings)


def _null_in(value: Any, place: str) -> str | None:
    """Return where the first null is, which TOML does not have; None where there is none."""
    if value is None:
        return place
    inner = (
        value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    )
    return next(filter(None, (_null_in(one, f"{place}.{key}".lstrip(".")) for key, one in inner)), None)
