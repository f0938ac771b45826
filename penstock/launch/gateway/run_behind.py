"""The runs that a site may answer for: one that it begins and ends, one of a folder, or a server's address.

    STATE/train.log, begun.json, ended.json, lock     as those of a job
    STATE/run                                          the run

What a gateway began goes on when it is killed; the next one on the same folder finds it again, or resumes it
where it has ended.
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

from penstock.config.configuration_error import ConfigurationError
from penstock.config.credentials import registry_with_password
from penstock.config.run_folder import CONFIG_FILE, make_private
from penstock.config.settings import Settings, load, parse_toml
from penstock.config.trusted import check_own
from penstock.gateway.sites.site import RunAddresses, RunSettings, Site
from penstock.launch.gateway.job_process import BEGUN_FILE, ENDED_FILE, LOG_FILE
from penstock.launch.gateway.local_runner import LOCK_FILE, RUN_FOLDER
from penstock.launch.inspection.processes import is_going_on, read_endpoints
from penstock.launch.run.supervised_service import last_line, penstock, without_configuration
from penstock.registry.weight_files import registry_url
from penstock.runtime.exit import Fatal

END_S: Final = 60.0
"""Longest wait for a run that drains, in seconds."""
_LONGEST_SOCKET: Final = 100
_MOST_STEPS: Final = 10**15
_NEVER_S: Final = 10**9
_UNENDING: Final = (
    "learner.stop_at_target=false",
    f"learner.total_steps={_MOST_STEPS}",
    f"learner.stall_timeout_s={_NEVER_S}",  # people may stay away for as long as they like
)


def addresses_in(folder: Path) -> RunAddresses:
    """Return what a run's folder says of where its processes are."""
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


class NamedServer:
    """A policy server, and perhaps a broker, by their addresses; own: settings that were said here."""

    def __init__(self, server: str, broker: str, own: Settings) -> None:
        self._addresses = RunAddresses(server=server, broker=broker)
        self._own = own

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave them as they are."""

    def addresses(self) -> RunAddresses:
        """Return what was named."""
        return self._addresses

    def settings(self) -> RunSettings:
        """Return what was said here of the task and of the registry."""
        return RunSettings(
            task=self._own.environment.kwargs, registry=registry_with_password(self._own.registry)
        )

    def failure(self) -> str:
        """Return "": who comes and goes there is not known."""
        return ""


class NamedRun:
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave it as it is."""

    def addresses(self) -> RunAddresses:
        """Return where its processes are now."""
        return addresses_in(self._folder)

    def settings(self) -> RunSettings | None:
        """Return what it was begun with."""
        return settings_in(self._folder)

    def failure(self) -> str:
        """Return why it is over; "" while it goes on."""
        return "" if is_going_on(self._folder) else f"{self._folder} has ended"


class OwnRun:
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
        cls, site: Site, state: Path, recipe: Path | None, settings: Sequence[str], *, learns: bool = False
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
        if not _is_free(self._lock):
            raise ConfigurationError(f"--state {self._said}: another gateway holds it; name another folder")
        if not self._goes_on():
            self._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ask the run to end, and wait until it has."""
        if self._goes_on():
            os.killpg(self._group(), signal.SIGTERM)  # the lock says that the group is there
        self._await_end()
        self._lock.close()

    def addresses(self) -> RunAddresses:
        """Return where its processes are now; "" for those that have not come up."""
        return addresses_in(self._run) if self._goes_on() else RunAddresses()

    def settings(self) -> RunSettings | None:
        """Return what it was begun with; None until its folder says so."""
        return settings_in(self._run)

    def failure(self) -> str:
        """Return why it is over; "" while it goes on."""
        if self._goes_on():
            return ""
        return last_line(self._state / LOG_FILE) or "it left no word"

    def _begin(self) -> None:
        for name in (BEGUN_FILE, ENDED_FILE):
            (self._state / name).unlink(missing_ok=True)
        words = ["--json", *(f"--set={one}" for one in self._settings)]
        if (self._run / CONFIG_FILE).exists():
            command = penstock("train", str(self._run), "--resume", *words)
        else:
            served = ("--actors", "0", "--serve", self._socket())
            command = penstock(
                "train", str(self._recipe.absolute()), "--run-dir", str(self._run), *served, *words
            )
        with (self._state / LOCK_FILE).open("a") as lock, (self._state / LOG_FILE).open("ab") as log:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            around = (sys.executable, "-P", "-m", "penstock.launch.gateway.job_process", str(lock.fileno()))
            self._child = subprocess.Popen(
                (*around, str(self._state), *command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env=without_configuration(os.environ),
                pass_fds=(lock.fileno(),),
                start_new_session=True,
            )

    def _group(self) -> int:
        if self._child is not None:
            return self._child.pid
        return int(json.loads((self._state / BEGUN_FILE).read_bytes())["group"])

    def _socket(self) -> str:
        path = self._run / "serve.sock"
        return f"unix:{path}" if len(str(path)) <= _LONGEST_SOCKET else "127.0.0.1:0"

    def _goes_on(self) -> bool:
        try:
            with (self._state / LOCK_FILE).open() as lock:
                return not _is_free(lock, fcntl.LOCK_SH)
        except FileNotFoundError:
            return False

    def _await_end(self) -> None:
        """Wait for the lock, which its processes hold; raises Fatal for a run that does not end."""
        if self._child is not None:
            try:
                self._child.wait(END_S)
            except subprocess.TimeoutExpired as error:
                raise Fatal(f"the run below {self._state} has not ended within {END_S:g} s") from error
            return
        with (self._state / LOCK_FILE).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)


def _is_free(file: IO[str], kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
