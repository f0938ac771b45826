"""The run behind a site: one that the gateway starts and stops, one of a folder, or a server's address.

    STATE/train.log, begun.json, ended.json, lock     files of a local job (`local_job`)
    STATE/run                                          the run
    STATE/loop.log                                     log of the loop, where the site learns

A run that a gateway started survives a kill of the gateway; the next gateway on the same folder finds it, or
resumes it where it has ended. The loop is started again when it ends, and it ends with the gateway: its
results lie in the folder of the run, from which the next loop continues.
"""

import fcntl
import logging
import os
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
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
from penstock.launch.jobs.local_job import LocalJob, lifeline, try_lock
from penstock.launch.run.supervisor import last_line, penstock, without_configuration
from penstock.registry.weight_files import registry_url
from penstock.runtime.exit import Fatal
from penstock.runtime.lifecycle import LIFELINE_VARIABLE

END_S: Final = 60.0
"""Longest wait for a run, and for a loop, that was asked to end, in seconds."""
LOOP_LOG: Final = "loop.log"
LOOK_S: Final = 1.0
AGAIN_S: Final = 10.0
"""Seconds after which a loop that ended is started again."""
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
    """Return the settings of the run in a folder; None before its configuration is written.

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


@dataclass(frozen=True, slots=True)
class NamedServer(RunBehind):
    """A policy server, and perhaps a broker, by their addresses. own: settings of this process."""

    server: str
    broker: str
    own: Settings

    def addresses(self) -> RunAddresses:
        return RunAddresses(server=self.server, broker=self.broker)

    def settings(self) -> RunSettings:
        return RunSettings(
            task=self.own.environment.kwargs, registry=registry_with_password(self.own.registry)
        )


class NamedRun(RunBehind):
    """A run that was started elsewhere, by its folder.

    Entering raises ConfigurationError for a folder without a run, and for a run without a policy server.
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
    """The run of a site's recipe, below a folder: entering finds, resumes or starts it, leaving ends it.

    Entering raises ConfigurationError for a folder that cannot be used.
    """

    def __init__(self, state: Path, recipe: Path, settings: Sequence[str]) -> None:
        self._named, self._recipe, self._settings = state, recipe, tuple(settings)
        self._state = state.absolute()
        self._run = self._state / RUN_FOLDER
        self._job = LocalJob(state)

    @classmethod
    def of_site(
        cls, site: Service, state: Path, recipe: Path | None, settings: Sequence[str], *, learns: bool = False
    ) -> Self:
        """Return the run of a site.

        state: its folder. recipe: file; None: the recipe of the site. settings: `SECTION.KEY=VALUE` over
        those of the site. learns: the loop of the site learns from the run.
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
            raise ConfigurationError(f"--state {self._named}: {error.strerror}; name a folder") from error
        if not try_lock(self._lock, fcntl.LOCK_EX):
            raise ConfigurationError(f"--state {self._named}: another gateway holds it; name another folder")
        if not self._job.is_running():
            self._begin()
        return self

    def __exit__(self, *_error: object) -> None:
        """Ask the run to end, and wait until it has; raises Fatal for one that does not end."""
        self._job.stop()
        if not self._job.wait(END_S):
            raise Fatal(f"the run below {self._state} has not ended within {END_S:g} s")
        self._lock.close()

    def addresses(self) -> RunAddresses:
        return addresses_in(self._run) if self._job.is_running() else RunAddresses()

    def settings(self) -> RunSettings | None:
        return settings_in(self._run)

    def failure(self) -> str:
        return "" if self._job.is_running() else self._job.last_line() or "its log is empty"

    def _begin(self) -> None:
        self._job.forget()
        words = ["--json", *(f"--set={one}" for one in self._settings)]
        if (self._run / CONFIG_FILE).exists():
            command = penstock("train", str(self._run), "--resume", *words)
        else:
            served = ("--actors", "0", "--serve", self._socket())
            command = penstock(
                "train", str(self._recipe.absolute()), "--run-dir", str(self._run), *served, *words
            )
        self._job.start(command)

    def _socket(self) -> str:
        path = self._run / "serve.sock"
        return f"unix:{path}" if len(str(path)) <= _LONGEST_SOCKET else "127.0.0.1:0"


class LoopBeside:
    """The process of a site's loop while the block runs; it is started again where it ends.

    words: arguments of `penstock` before the folder of the run. options: those behind it. state: folder of
    the log. run: that the loop learns for.
    """

    def __init__(self, words: Sequence[str], options: Sequence[str], state: Path, run: RunBehind) -> None:
        self._words, self._options, self._state, self._behind = words, options, state, run
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
            while (run := self._behind.settings()) is None or run.folder is None:
                if self._over.wait(LOOK_S):
                    return
        except ConfigurationError as error:
            log.warning("the loop is not started", extra={"why": str(error)})
            return
        while not self._over.is_set():
            code = self._run(run.folder)
            if not self._over.is_set():
                last = last_line(self._state / LOOP_LOG)
                log.warning("the loop has ended, and is started again", extra={"code": code, "last": last})
            self._over.wait(AGAIN_S)

    def _run(self, folder: Path) -> int:
        """Run the loop on the folder of a run until it ends or the block does; return its exit code."""
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
