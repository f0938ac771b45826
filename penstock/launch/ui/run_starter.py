"""Starts trainings in a folder of runs, from settings that a person entered in a browser.

A training is a process in its own session: it continues when the page ends. Its settings and its output are
in the state folder of the page, `starts/NAME`, for the last start of each name.
"""

import ast
import functools
import inspect
import shutil
import textwrap
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import tomli_w

from penstock.config.algorithm_sections import SECTIONS, algorithm_sections
from penstock.config.run_folder import make_private
from penstock.config.sections import Section
from penstock.config.settings import ConfigurationError, Settings, load
from penstock.launch.inspection.processes import is_going_on
from penstock.launch.jobs.job_process import LOG_FILE
from penstock.launch.jobs.local_job import LocalJob
from penstock.launch.run.supervisor import penstock
from penstock.launch.ui.catalogue import is_run

# ---- The JSON schema of the settings of a run, with descriptions, and with the section of every algorithm.

ALGORITHMS: Final = "algorithms"
"""Key of the schema for the sections of algorithms, by `algorithm.name`."""


@functools.cache
def settings_schema() -> dict[str, Any]:
    """Return the schema of all sections; raises ConfigurationError for an invalid one of a workload."""
    schema = _described(Settings)
    schema[ALGORITHMS] = {
        name: _described(kind) for name, kind in {**SECTIONS, **algorithm_sections()}.items()
    }
    return schema


def _described(kind: type[Section]) -> dict[str, Any]:
    """Return the schema of a section, with nested sections, descriptions, and the flag `advanced`."""
    schema = kind.model_json_schema()
    for name, field in kind.model_fields.items():
        shown = schema["properties"][name]
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section) and name != "algorithm":
            shown = schema["properties"][name] = _described(inner)
        shown["description"] = _help(kind).get(name) or shown.get("description", "")
        shown["advanced"] = kind.is_advanced(name)
    return schema


@functools.cache
def _help(kind: type[Section]) -> dict[str, str]:
    """Return the docstring of each field of a section and of its base classes."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        if issubclass(one, Section) and one is not Section:
            body = ast.parse(textwrap.dedent(inspect.getsource(one))).body[0]
            assert isinstance(body, ast.ClassDef)
            for field, line in zip(body.body, body.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    found[field.target.id] = _text(line)
    return found


def _text(line: ast.stmt) -> str:
    if not isinstance(line, ast.Expr) or not isinstance(line.value, ast.Constant):
        return ""
    return inspect.cleandoc(str(line.value.value)).replace("\n", " ")


WAIT_S: Final = 120.0
"""Seconds within which the run of a started training must exist."""
_LOOK_S: Final = 0.2


class CannotStart(Exception):
    """Reports a training that was not started, and why. field: wrong field of the request."""

    def __init__(self, why: str, field: str | None = None) -> None:
        super().__init__(why)
        self.field = field


class RunStarter:
    """Starts trainings in the folder `runs`. state: folder for their settings and output."""

    def __init__(self, runs: Path, state: Path) -> None:
        self._runs, self._state = runs, state
        self._jobs: list[LocalJob] = []
        self._lock = threading.Lock()

    def start(self, name: str, settings: Mapping[str, Any]) -> None:
        """Start a training as the run `name`, and return once the run exists; raises CannotStart."""
        if is_run(self._runs):
            raise CannotStart("this is the folder of one run: start `penstock ui` on the folder above it")
        checked = _checked({"run": name, **settings})
        run = self._runs / name
        with self._lock:  # of two requests for one name, the second finds the folder of the first
            self._jobs = [job for job in self._jobs if job.is_running()]
            try:
                run.mkdir(mode=0o700)
            except FileExistsError:
                raise CannotStart("there is a run of this name: choose another", "name") from None
            except OSError as error:
                raise CannotStart(f"{self._runs.name}: {error.strerror}") from error
        try:
            self._begin(run, checked)
        except OSError as error:
            raise CannotStart(f"it could not be started: {error.strerror}") from error

    def _begin(self, run: Path, settings: Mapping[str, Any]) -> None:
        place = self._state / "starts" / run.name
        make_private(place)
        recipe, log = place / "asked.toml", place / LOG_FILE
        recipe.write_text(tomli_w.dumps(settings))
        job = LocalJob(place)
        job.forget()
        log.unlink(missing_ok=True)
        if not job.start(penstock("train", str(recipe), "--run-dir", str(run), "--json")):
            raise CannotStart("another training of this name is being started: choose another", "name")
        self._jobs.append(job)
        until_s = time.monotonic() + WAIT_S
        while not (is_run(run) and is_going_on(run)):
            if not job.wait(_LOOK_S):
                if time.monotonic() > until_s:
                    raise CannotStart(f"its run did not appear within {WAIT_S:g} s: see {log}")
                continue
            if is_run(run):
                return  # it has ended already: the page shows how
            shutil.rmtree(run, ignore_errors=True)  # it never became a run: the name is free again
            raise CannotStart(job.last_line() or f"it ended with exit code {job.exit_code()}")


def _checked(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return valid settings; raises CannotStart that names the first wrong one."""
    try:
        unset = _null_in(settings, "")
        if unset is not None:
            raise CannotStart(
                f"{unset}: null is no value: leave out settings that keep their defaults", f"settings.{unset}"
            )
        load([settings])
    except RecursionError as error:
        raise CannotStart("the settings are nested too deeply: use fewer levels", "settings") from error
    except ConfigurationError as error:
        why = str(error).splitlines()[0]
        key = why.partition("=")[0].partition(":")[0]
        raise CannotStart(why, f"settings.{key}") from error
    return dict(settings)


def _null_in(value: Any, place: str) -> str | None:
    """Return the place of the first null, which TOML does not have; None without one."""
    if value is None:
        return place
    inner = (
        value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    )
    return next(filter(None, (_null_in(one, f"{place}.{key}".lstrip(".")) for key, one in inner)), None)
