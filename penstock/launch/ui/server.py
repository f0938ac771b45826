"""Serves the page: in the foreground for `penstock ui`, beside the supervisor for `penstock train --ui`.

Plain HTTP, so it binds to loopback unless `--insecure` is given. In the foreground it lets in one browser, by
the secret in the address that it prints. Beside a run it lives in a thread of the launcher that the run does
not wait for: a failure of the page does not affect the run.
"""

import getpass
import json
import logging
import os
import socket
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from penstock.config.configuration_error import how_to_install
from penstock.config.run_folder import CONFIG_FILE, LOCK_FILE, read_whole
from penstock.config.settings import ConfigurationError, Settings, load, parse_toml
from penstock.gateway.personal.shown_runs import PARAMETER, Admission, UnknownRun
from penstock.launch.inspection.curve import Curve, rates
from penstock.launch.inspection.processes import ENDPOINTS_FILE, METRICS_FILE, is_going_on, read_learnt
from penstock.launch.inspection.watch import Watch, watch_folder
from penstock.launch.policy.policy_view import find_place, opened, traffic_json, version_json
from penstock.launch.run.summary import SUMMARY_FILE
from penstock.rpc.address import check_address, is_local
from penstock.runtime.exit import EXIT_INTERRUPTED, EXIT_OK, Fatal
from penstock.runtime.lifecycle import Lifecycle

if TYPE_CHECKING:
    from penstock.gateway.personal.shown_runs import Actions


# ---- The runs of a folder, as the page shows them.

MAX_RUNS: Final = 500
"""Most runs that are shown, the newest."""
_CURVE_POINTS: Final = 600
_SIGNS: Final = (METRICS_FILE, ENDPOINTS_FILE, LOCK_FILE)


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

    @property
    def folder(self) -> str:
        """Return the folder's name for display; its path is not disclosed."""
        return self._folder.name

    def runs(self) -> list["ShownRun"]:
        """Return the runs, newest first."""
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

    def folder_of(self, name: str) -> Path:
        """Return the folder of the run of this name; raises UnknownRun."""
        return self.find(name).folder

    def listed(self) -> dict[str, Any]:
        """Return the folder's name, and a row for every run, newest first."""
        return {"folder": self.folder, "runs": [asdict(run.facts()) for run in self.runs()]}

    def detail(self, name: str) -> dict[str, Any]:
        """Return one run: its progress, its current activity, its end; raises UnknownRun."""
        return self.find(name).detail()

    def curve(self, name: str) -> dict[str, list[Any]]:
        """Return its curve as columns; raises UnknownRun."""
        return self.find(name).curve()

    def versions(self, name: str) -> dict[str, Any]:
        """Return the versions of its policy, newest first, and its traffic; raises UnknownRun."""
        return self.find(name).versions()


class ShownRun:
    """One run of the list, with the data read of it so far."""

    def __init__(self, folder: Path) -> None:
        # A name on disk is bytes, and those need not be text.
        self.name = os.fsencode(folder.name).decode(errors="backslashreplace")
        self.folder = folder
        self._lock = threading.Lock()
        self._curve = Curve(folder / METRICS_FILE, _CURVE_POINTS)
        self._watch: Watch | None = None
        self._facts: tuple[tuple[Any, ...], RunFacts] | None = None

    def facts(self) -> RunFacts:
        """Return its row of the list; read again when a file has changed."""
        names = (CONFIG_FILE, METRICS_FILE, SUMMARY_FILE)
        try:
            going_on = is_going_on(self.folder)
            seal = (going_on, *(_stamp(self.folder / name) for name in names))
        except (OSError, ConfigurationError) as error:
            return self._unreadable(error)
        with self._lock:
            if self._facts is None or self._facts[0] != seal:
                self._facts = (seal, self._facts_or_why(going_on=going_on))
            return self._facts[1]

    def detail(self) -> dict[str, Any]:
        """Return the facts, and of a run that goes on its current activity."""
        facts = self.facts()
        now = self._look() if facts.state == "running" else None
        summary = None if facts.why else _json_file(self.folder / SUMMARY_FILE)
        return {"run": asdict(facts), "now": now, "summary": summary}

    def curve(self) -> dict[str, list[Any]]:
        """Return columns of equal length, thinned, oldest first."""
        with self._lock:
            points = self._curve.poll()
        columns = ("env_steps", "seconds", "mean_return", "staleness", "version")
        found: dict[str, list[Any]] = {name: [getattr(one, name) for one in points] for name in columns}
        return found | {"rate": rates(points)}

    def versions(self) -> dict[str, Any]:
        """Return the versions of its policy in the registry; `note` says why there are none."""
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
            self._watch = self._watch or watch_folder(self.folder)
        return self._watch.look().as_json()

    def _facts_or_why(self, *, going_on: bool) -> RunFacts:
        """Its row; one run that cannot be read hides no other."""
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

    def _read_facts(self, *, going_on: bool) -> RunFacts:
        settings, learnt = _settings(self.folder), read_learnt(self.folder / METRICS_FILE)
        summary = _json_file(self.folder / SUMMARY_FILE) or {}
        row = learnt.row if learnt else {}
        return RunFacts(
            name=self.name,
            environment=settings.environment.id,
            seed=settings.seed,
            state="running" if going_on else _ending(summary),
            started=_begun(self.folder),
            target_return=_figure(summary.get("target_return", settings.learner.target_return)),
            env_steps=row.get("env_steps"),
            updates=row.get("updates"),
            version=row.get("version"),
            publications=row.get("publications"),
            mean_return=row.get("mean_return"),
            steps_per_second=_figure(
                row.get("steps_per_second") if going_on else summary.get("env_steps_per_second")
            ),
            training_seconds=row.get("training_seconds"),
        )


def _figure(value: Any) -> float | None:
    """Return a number of a summary; None for what is none."""
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
    """Return whether a folder is that of a run."""
    if not os.access(folder, os.R_OK | os.X_OK):
        return False  # somebody else's
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
    """Return the run's settings; the defaults for those of another version, or that only look like ours.

    Raises ConfigurationError for a file that is no TOML.
    """
    written = parse_toml(folder / CONFIG_FILE)
    try:
        return load([written])
    except ConfigurationError:
        return Settings()


def _json_file(file: Path) -> dict[str, Any] | None:
    """Return the object of a file, None where there is none; raises ConfigurationError for anything else."""
    try:
        content = json.loads(read_whole(file))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{file.name}: no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{file.name}: holds no JSON object")
    return content


BESIDE_A_RUN: Final = "127.0.0.1:0"
_STOP_S: Final = 2.0

log = logging.getLogger(__name__)


class Page:
    """The page of a folder of runs, on a socket that is bound when this is made.

    admission: who is let in. state: folder of what is started here; None: everything is only looked at.

    Raises ConfigurationError for an address that is taken, or beyond loopback without `insecure`, and where
    the extra `ui` is not installed.
    """

    def __init__(
        self,
        folder: Path,
        address: str,
        *,
        insecure: bool,
        admission: Admission | None = None,
        state: Path | None = None,
    ) -> None:
        try:
            import uvicorn

            from penstock.gateway.frame.envelope import Doors
            from penstock.gateway.http_server import EndingServer
            from penstock.gateway.personal.personal_application import make_app
        except ImportError as error:
            raise ConfigurationError(f"no page without its extra: {error}; {how_to_install('ui')}") from error
        _check(address, insecure=insecure)
        self._socket = _bind(address)
        host, port = self._socket.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
        runs = Catalogue(folder)
        app = make_app(
            runs,
            doors=Doors(any_host=not is_local(address), large=frozenset()),
            admission=admission,
            actions=None if state is None else _actions(runs, folder, state),
        )
        # The launcher's own logging stays as it is: lines of a web server are no lines of a run.
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            http="h11",
        )
        self._server = EndingServer(config)
        self._thread = threading.Thread(target=self._run, name="page", daemon=True)

    def __enter__(self) -> Self:
        """Serve from a thread."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(_STOP_S)
        self._socket.close()

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        except Exception:
            log.exception("the page has ended")


def main(folder: Path, address: str, *, insecure: bool) -> int:
    """Run `penstock ui`: serve until asked to end; returns the exit code.

    Args:
        folder: holds runs, or is one.
        address: HOST:PORT at which to listen.
        insecure: permit an address beyond loopback.

    Raises:
        ConfigurationError: as `Page` does.
    """
    if not folder.is_dir():
        raise ConfigurationError(f"{folder}: no such folder; name the one that holds runs, as `runs`")
    lifecycle = Lifecycle("ui")
    lifecycle.install()
    admission = Admission()
    state = state_folder() if is_local(address) and os.access(folder, os.W_OK) else None
    with Page(folder, address, insecure=insecure, admission=admission, state=state) as page:
        sys.stdout.write(f"{page.url}?{PARAMETER}={admission.secret}\n")
        sys.stdout.flush()
        lifecycle.draining.wait()
    return EXIT_INTERRUPTED if lifecycle.interrupted else EXIT_OK


def state_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of what the page keeps, as XDG says; a relative one is left out, as there."""
    said = Path(environ.get("XDG_STATE_HOME", ""))
    return (said if said.is_absolute() else Path.home() / ".local" / "state") / "penstock" / "ui"


def _actions(runs: Catalogue, folder: Path, state: Path) -> "Actions":
    from penstock.gateway.personal.shown_runs import Actions
    from penstock.launch.gateway.run_steering import RunSteering
    from penstock.launch.ui.run_starter import RunStarter

    starter = RunStarter(folder.resolve(), state, is_run)
    return Actions(starter=starter, steering=RunSteering(runs.folder_of), by=getpass.getuser())


def _check(address: str, *, insecure: bool) -> None:
    try:
        check_address(address)
    except ValueError as error:
        raise ConfigurationError(f"--listen {address}: write HOST:PORT") from error
    if address.startswith("unix:"):
        raise ConfigurationError(f"--listen {address}: a browser needs HOST:PORT")
    if not insecure and not is_local(address):
        raise ConfigurationError(
            f"--listen {address}: beyond loopback anybody could read the page, it has no authentication; "
            "forward a port (ssh -L), or say --insecure"
        )


def _bind(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, int(port)), family=family)
    except OSError as error:
        raise ConfigurationError(
            f"--listen {address}: {error.strerror}; choose another port, or 0"
        ) from error
