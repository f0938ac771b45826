"""The runs that a site may answer for: one that it begins and ends, one of a folder, or a server's address.

    STATE/train.log, begun.json, ended.json, lock     those of a local job
    STATE/run                                          the run
    STATE/loop.log                                     of the loop beside it, where the site learns

A run that a gateway began goes on when the gateway is killed; the next one on the same folder finds it, or
resumes it where it has ended. The loop is begun again where it ends, and ends with the gateway: its results
lie in the folder of the run, so that the next one goes on from there.
"""

import fcntl
import json
import logging
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Self

from penstock.config.configuration_error import ConfigurationError
from penstock.config.credentials import registry_with_password
from penstock.config.run_folder import CONFIG_FILE, make_private
from penstock.config.settings import Settings, load, parse_toml
from penstock.config.trusted import check_own
from penstock.gateway.application import Service
from penstock.gateway.upstream import RunAddresses, RunBehind, RunSettings
from penstock.launch.gateway.local_runner import RUN_FOLDER
from penstock.launch.inspection.processes import is_going_on, read_endpoints
from penstock.launch.jobs import local_jobs
from penstock.launch.jobs.job_process import BEGUN_FILE, LOG_FILE
from penstock.launch.jobs.local_jobs import LOCK_FILE, lifeline, try_lock
from penstock.launch.run.supervisor import last_line, penstock, without_configuration
from penstock.registry.weight_files import registry_url
from penstock.runtime.exit import Fatal
from penstock.runtime.lifecycle import LIFELINE_VARIABLE

END_S: Final = 60.0
"""Longest wait for a run that drains, and for a loop that ends, in seconds."""
LOOP_LOG: Final = "loop.log"
LOOK_S: Final = 1.0
AGAIN_S: Final = 10.0
"""Seconds after which a loop that ended is begun again."""
_LONGEST_SOCKET: Final = 100
_MOST_STEPS: Final = 10**15
_NEVER_S: Final = 10**9
_UNENDING: Final = (
    "learner.stop_at_target=false",
    f"learner.total_steps={_MOST_STEPS}",
    f"learner.stall_timeout_s={_NEVER_S}",  # people may stay away for as long as they like
)

log = logging.getLogger(__name__)


def addresses_in(folder: Path) -> RunAddresses:
    found = read_endpoints(folder).values()
    by_role = {one.role: str(one.address) for one in found if one.address}
    return RunAddresses(server=by_role.get("server", ""), broker=by_role.get("broker", ""))


def settings_in(folder: Path) -> RunSettings | None:
    """Return what a run's folder says that it was begun with; None before it says so.

    Raises ConfigurationError for a folder that names modules or places and that this user did not make.
    """
    file = folder / CONFIG_FILE
    if not file.is_file():
        return None
    settings = load([parse_toml(file)])
    check_own(folder, settings, (), "serve it where, and as whom, it was made")
    return RunSettings(
        task=settings.environment.kwargs,
        registry=registry_url(folder, registry_with_password(settings.registry)),
        policy=settings.serving.policy,
        folder=folder,
        false_alarm=settings.canary.false_alarm,
    )


class NamedServer(RunBehind):
    """A policy server, and perhaps a broker, by their addresses; own: settings that were said here."""

    def __init__(self, server: str, broker: str, own: Settings) -> None:
        self._addresses = RunAddresses(server=server, broker=broker)
        self._own = own

    def addresses(self) -> RunAddresses:
        return self._addresses

    def settings(self) -> RunSettings:
        return RunSettings(
            task=self._own.environment.kwargs, registry=registry_with_password(self._own.registry)
        )


class NamedRun(RunBehind):
    """A run of somebody's, by its folder.

    Entering raises ConfigurationError for what is none, and for one without a server.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> Self:
        if not (self._folder / CONFIG_FILE).is_file():
            raise ConfigurationError(f"--run {self._folder}: no folder of a run")
        if not is_going_on(self._folder):
            raise ConfigurationError(
                f"--run {self._folder}: the run has ended; `penstock train --resume` goes on with it"
            )
        if not self.addresses().server:
            raise ConfigurationError(
                f"--run {self._folder}: it has no policy server: start it with --serve ADDRESS"
            )
        return self

    def addresses(self) -> RunAddresses:
        return addresses_in(self._folder)

    def settings(self) -> RunSettings | None:
        return settings_in(self._folder)

    def failure(self) -> str:
        return "" if is_going_on(self._folder) else f"{self._folder} has ended"


class OwnRun(RunBehind):
    """The run of a site's recipe, below a folder: found, resumed or begun by entering, ended by leaving.

    Entering raises ConfigurationError for a folder that cannot be used.
    """

    def __init__(self, state: Path, recipe: Path, settings: Sequence[str]) -> None:
        self._said, self._recipe, self._settings = state, recipe, tuple(settings)
        self._state = state.absolute()
        self._run = self._state / RUN_FOLDER
        self._child: subprocess.Popen[bytes] | None = None

    @classmethod
    def of_site(
        cls, site: Service, state: Path, recipe: Path | None, settings: Sequence[str], *, learns: bool = False
    ) -> Self:
        """Return the run of a site. recipe: None for its own. settings: over those of the site.

        learns: whether the site's loop learns from it.
        """
        own = site.loop.settings if learns and site.loop is not None else ()
        return cls(state, recipe or site.recipe, (*_UNENDING, *site.settings, *own, *settings))

    def __enter__(self) -> Self:
        if not self._recipe.is_file():
            raise ConfigurationError(
                f"--recipe {self._recipe}: no such file; name a recipe, or a run with --run"
            )
        try:
            make_private(self._state)
            self._lock = (self._state / "gateway.lock").open("a")
        except OSError as error:
            raise ConfigurationError(f"--state {self._said}: {error.strerror}; name a folder") from error
        if not try_lock(self._lock, fcntl.LOCK_EX):
            raise ConfigurationError(f"--state {self._said}: another gateway holds it; name another folder")
        if not local_jobs.goes_on(self._state):
            self._begin()
        return self

    def __exit__(self, *_error: object) -> None:
        """Ask the run to end, and wait until it has; raises Fatal for one that does not end."""
        if local_jobs.goes_on(self._state):
            os.killpg(self._group(), signal.SIGTERM)  # the lock says that the group is there
        if self._child is None:
            with (self._state / LOCK_FILE).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH)
        else:
            try:
                self._child.wait(END_S)
            except subprocess.TimeoutExpired as late:
                raise Fatal(f"the run below {self._state} has not ended within {END_S:g} s") from late
        self._lock.close()

    def addresses(self) -> RunAddresses:
        return addresses_in(self._run) if local_jobs.goes_on(self._state) else RunAddresses()

    def settings(self) -> RunSettings | None:
        return settings_in(self._run)

    def failure(self) -> str:
        if local_jobs.goes_on(self._state):
            return ""
        return last_line(self._state / LOG_FILE) or "it left no word"

    def _begin(self) -> None:
        local_jobs.forget(self._state)
        words = ["--json", *(f"--set={one}" for one in self._settings)]
        if (self._run / CONFIG_FILE).exists():
            command = penstock("train", str(self._run), "--resume", *words)
        else:
            served = ("--actors", "0", "--serve", self._socket())
            command = penstock(
                "train", str(self._recipe.absolute()), "--run-dir", str(self._run), *served, *words
            )
        self._child = local_jobs.start(
            self._state, command, cwd=self._state, env=without_configuration(os.environ)
        )

    def _group(self) -> int:
        if self._child is not None:
            return self._child.pid
        return int(json.loads((self._state / BEGUN_FILE).read_bytes())["group"])

    def _socket(self) -> str:
        path = self._run / "serve.sock"
        return f"unix:{path}" if len(str(path)) <= _LONGEST_SOCKET else "127.0.0.1:0"


class LoopBeside:
    """The process of a site's loop while the block runs.

    words: of `penstock`, before the folder of the run. options: behind it. settings: say where the run is,
    None until that is known. state: folder of its log.
    """

    def __init__(
        self,
        words: Sequence[str],
        options: Sequence[str],
        settings: Callable[[], RunSettings | None],
        state: Path,
    ) -> None:
        self._words, self._options, self._settings, self._state = words, options, settings, state
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._go, name="loop", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        """Ask it to end, and wait until it has."""
        self._over.set()
        self._thread.join()

    def _go(self) -> None:
        try:
            while (run := self._settings()) is None or run.folder is None:
                if self._over.wait(LOOK_S):
                    return
        except ConfigurationError as error:
            log.warning("there is no loop", extra={"why": str(error)})
            return
        while not self._over.is_set():
            code = self._run(run.folder)
            if not self._over.is_set():
                said = last_line(self._state / LOOP_LOG)
                log.warning("the loop has ended, and is begun again", extra={"code": code, "said": said})
            self._over.wait(AGAIN_S)

    def _run(self, folder: Path) -> int:
        """Run the process to its end, or until this one is over; returns its exit code."""
        self._state.mkdir(parents=True, exist_ok=True, mode=0o700)
        with lifeline() as watched, (self._state / LOOP_LOG).open("ab") as out:
            child = subprocess.Popen(
                penstock(*self._words, str(folder), *self._options),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**without_configuration(os.environ), LIFELINE_VARIABLE: str(watched)},
                pass_fds=(watched,),
                process_group=0,
            )
            while child.poll() is None:
                if self._over.wait(LOOK_S):
                    child.terminate()
                    return _awaited(child)
            return int(child.returncode)


def _awaited(child: "subprocess.Popen[bytes]") -> int:
    try:
        return child.wait(END_S)
    except subprocess.TimeoutExpired:
        log.warning("the loop did not end in time, and is killed", extra={"seconds": END_S})
        child.kill()
        return child.wait()
