"""The runs of a folder, as the page shows them."""

import json
import os
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from penstock.config.run_folder import CONFIG_FILE, LOCK_FILE, read_whole
from penstock.config.settings import ConfigurationError, Settings, load, parse_toml
from penstock.launch.inspection.curve import Curve, rates
from penstock.launch.inspection.flow import Watch
from penstock.launch.inspection.processes import ENDPOINTS_FILE, METRICS_FILE, is_going_on, read_learnt
from penstock.launch.policy.policy_versions import find_place, opened, traffic_json, version_json
from penstock.launch.run.summary import SUMMARY_FILE
from penstock.runtime.exit import Fatal

MAX_RUNS: Final = 500
"""Most runs that are shown; the newest ones."""
_CURVE_POINTS: Final = 600
_LEARNT: Final = ("env_steps", "updates", "version", "publications", "mean_return", "training_seconds")
_SIGNS: Final = (METRICS_FILE, ENDPOINTS_FILE, LOCK_FILE)


class UnknownRun(KeyError):
    """Reports that there is no run of this name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """A row of the list. started: Unix time. Numbers are None before the learner's first line."""

    name: str
    environment: str
    seed: int
    state: str
    started: float
    target_return: float | None = None
    env_steps: int | None = None
    updates: int | None = None
    version: int | None = None
    publications: int | None = None
    mean_return: float | None = None
    steps_per_second: float | None = None
    training_seconds: float | None = None
    why: str = ""
    """Of a run whose files cannot be read."""


class Catalogue:
    """The runs of `folder`, which holds runs or is one. Safe to use from several threads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._lock = threading.Lock()
        self._known: dict[Path, ShownRun] = {}

    def runs(self) -> list["ShownRun"]:
        single = [self._folder] if is_run(self._folder) else []
        folders = single or [path for path in _children(self._folder) if is_run(path)]
        folders = sorted(folders, key=_begun, reverse=True)[:MAX_RUNS]
        with self._lock:
            self._known = {path: self._known.get(path) or ShownRun(path) for path in folders}
            return list(self._known.values())

    def find(self, name: str) -> "ShownRun":
        """Return the run of this name; raises UnknownRun."""
        for run in self.runs():
            if run.name == name:
                return run
        raise UnknownRun(name)

    def listed(self) -> dict[str, Any]:
        """Return the name of the folder, and a row for every run, newest first."""
        return {"folder": self._folder.name, "runs": [asdict(run.facts()) for run in self.runs()]}


class ShownRun:
    """A run of the list, with the data that was read so far."""

    def __init__(self, folder: Path) -> None:
        # A file name may be bytes that are no UTF-8.
        self.name = os.fsencode(folder.name).decode(errors="backslashreplace")
        self.folder = folder
        self._lock = threading.Lock()
        self._curve = Curve(folder / METRICS_FILE, _CURVE_POINTS)
        self._watch: Watch | None = None
        self._facts: tuple[tuple[Any, ...], RunFacts] | None = None

    def facts(self) -> RunFacts:
        """Return its row of the list, read again when a file has changed; errors are part of the row."""
        names = (CONFIG_FILE, METRICS_FILE, SUMMARY_FILE)
        try:
            going_on = is_going_on(self.folder)
            seal = (going_on, *(_stamp(self.folder / name) for name in names))
            with self._lock:
                if self._facts is None or self._facts[0] != seal:
                    self._facts = (seal, self._facts_or_why(going_on=going_on))
                return self._facts[1]
        except (OSError, ConfigurationError) as error:
            return self._unreadable(error)

    def _facts_or_why(self, *, going_on: bool) -> RunFacts:
        """Return its row; one run that cannot be read hides no other."""
        try:
            return self._read_facts(going_on=going_on)
        except (OSError, ConfigurationError) as error:
            return self._unreadable(error)

    def _unreadable(self, error: Exception) -> RunFacts:
        return RunFacts(
            name=self.name,
            environment="",
            seed=0,
            state="unreadable",
            started=_begun(self.folder),
            why=str(error),
        )

    def detail(self) -> dict[str, Any]:
        facts = self.facts()
        now = self._look() if facts.state == "running" else None
        summary = None if facts.why else _json_file(self.folder / SUMMARY_FILE)
        return {"run": asdict(facts), "now": now, "summary": summary}

    def curve(self) -> dict[str, list[Any]]:
        with self._lock:
            points = self._curve.poll()
        columns = ("env_steps", "seconds", "mean_return", "staleness", "version")
        found: dict[str, list[Any]] = {name: [getattr(one, name) for one in points] for name in columns}
        return found | {"rate": rates(points)}

    def versions(self) -> dict[str, Any]:
        """Return the registered versions of its policy; `note`: why there are none."""
        try:
            place = find_place(str(self.folder), None, None)
            with opened(place) as registry:
                versions, traffic = registry.list(place.policy), registry.traffic(place.policy)
        except (ConfigurationError, Fatal) as error:
            return {"versions": [], "traffic": None, "note": str(error)}
        return {
            "versions": [version_json(one) for one in reversed(versions)],
            "traffic": traffic_json(traffic),
            "note": "",
        }

    def _look(self) -> dict[str, Any]:
        with self._lock:
            self._watch = self._watch or Watch(self.folder)
        return self._watch.look().as_json()

    def _read_facts(self, *, going_on: bool) -> RunFacts:
        settings, learnt = _settings(self.folder), read_learnt(self.folder / METRICS_FILE)
        summary = _json_file(self.folder / SUMMARY_FILE) or {}
        row = learnt.row if learnt else {}
        found: dict[str, Any] = {name: row.get(name) for name in _LEARNT}
        return RunFacts(
            name=self.name,
            environment=settings.environment.id,
            seed=settings.seed,
            state="running" if going_on else _ending(summary),
            started=_begun(self.folder),
            target_return=_figure(summary.get("target_return", settings.learner.target_return)),
            steps_per_second=_figure(
                row.get("steps_per_second") if going_on else summary.get("env_steps_per_second")
            ),
            **found,
        )


def _figure(value: Any) -> float | None:
    """Return a number of a summary; None for other values."""
    return value if isinstance(value, int | float) else None


def _ending(summary: dict[str, Any]) -> str:
    if "failure" in summary:
        return "failed"
    if summary.get("solved"):
        return "solved"
    if summary.get("interrupted"):
        return "interrupted"
    return "finished" if summary else "ended"


def is_run(folder: Path) -> bool:
    if not os.access(folder, os.R_OK | os.X_OK):
        return False  # of another user
    return (folder / CONFIG_FILE).is_file() and any((folder / sign).exists() for sign in _SIGNS)


def _children(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.is_dir()]
    except FileNotFoundError:
        return []


def _begun(folder: Path) -> float:
    try:
        return (folder / CONFIG_FILE).stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        found = file.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_size


def _settings(folder: Path) -> Settings:
    """Return the settings of a run; defaults if they are of another version of Penstock.

    Raises ConfigurationError for a file that is no TOML.
    """
    written = parse_toml(folder / CONFIG_FILE)
    try:
        return load([written])
    except ConfigurationError:
        return Settings()


def _json_file(file: Path) -> dict[str, Any] | None:
    """Return the JSON object of a file, None without a file; raises ConfigurationError for other content."""
    try:
        content = json.loads(read_whole(file))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{file.name}: no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{file.name}: holds no JSON object")
    return content
