"""The parts of an injector from the options of `penstock inject`, and its life as a process."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from penstock.client import PolicyClient
from penstock.config.configuration_error import ConfigurationError
from penstock.config.credentials import credentials
from penstock.config.settings import Settings
from penstock.runtime.exit import EXIT_FAILED, EXIT_OK
from penstock.workloads.goals.host import SimulatedHost
from penstock.workloads.goals.injector.injection_journal import QuietHours, last_switch, switch, veto
from penstock.workloads.goals.injector.injector import Drifted, Injector
from penstock.workloads.goals.injector.injector_view import as_text, explain
from penstock.workloads.goals.live_host import Commands, Executor, read_commands

OPERATOR: Final = "operator"
"""Who uses the command line, in the files of a folder."""


def work(injector: Injector, steps: int, *, as_json: bool) -> int:
    """Inject until the process is to end, and print what was done; returns 1 where it has stopped itself."""
    injector.recover()
    code = EXIT_OK
    try:
        injector.run(steps)
    except Drifted as error:
        sys.stderr.write(f"injecting has stopped: {error}; look with --explain, then start with --resume\n")
        code = EXIT_FAILED
    counts = dict(injector.counts)
    text = ", ".join(f"{count} {name}" for name, count in counts.items()) or "nothing was done"
    sys.stdout.write((json.dumps(counts) if as_json else text) + "\n")
    return code


def once(folder: Path, *, wanted: str | None, forbidden: str | None, as_json: bool) -> int:
    """Switch carrying out, else forbid a goal, else print the outcomes of a folder's goals."""
    if wanted is not None:
        if wanted not in ("on", "off"):
            raise ConfigurationError(f"--switch {wanted}: say on or off")
        switch(folder, on=wanted == "on", by=OPERATOR)
    elif forbidden is not None:
        veto(folder, forbidden, OPERATOR)
    else:
        told = explain(folder)
        sys.stdout.write((json.dumps(told) if as_json else as_text(told)) + "\n")
    return EXIT_OK


def executor_of(goals: Path | None, simulated: int | None) -> tuple[Executor, tuple[bool, ...]]:
    """Return what carries goals out, and which actions may be tried below the threshold."""
    if (goals is None) == (simulated is None):
        raise ConfigurationError("--goals FILE or --simulated SEED: name one of them")
    if goals is not None:
        file = read_commands(goals)
        return Commands(file, acts=True), (False, *(one.safe for one in file.goal))
    host = SimulatedHost()
    host.reset(simulated or 0)
    return host, (False, *(True for _ in host.goals))


def quiet_hours(quiet: Sequence[str]) -> tuple[QuietHours, ...]:
    try:
        return tuple(map(QuietHours.parse, quiet))
    except ValueError as error:
        raise ConfigurationError(f"--quiet: {error}") from error


def client_of(settings: Settings, server: str, policy: str) -> PolicyClient:
    try:
        return PolicyClient(server, credentials=credentials(settings.security), policy=policy)
    except ValueError as error:
        raise ConfigurationError(f"--server {server}: {error}") from error


def tell_switch(folder: Path, *, auto: bool) -> None:
    """Say where the switch of the folder counts more than the option."""
    found = last_switch(folder)
    if found is not None and found.on != auto:
        sys.stderr.write(
            f"auto is {'on' if found.on else 'off'} in {folder}, as it was switched; --switch changes that\n"
        )
