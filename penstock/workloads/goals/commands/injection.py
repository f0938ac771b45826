"""What `penstock inject` does: its parts from options, and its life as a process."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from penstock.client import PolicyClient
from penstock.config.configuration_error import ConfigurationError
from penstock.config.credentials import credentials
from penstock.config.settings import Settings
from penstock.runtime.exit import EXIT_FAILED, EXIT_OK
from penstock.runtime.lifecycle import Lifecycle
from penstock.workloads.goals.host import History, SimulatedHost
from penstock.workloads.goals.injector.injection_journal import (
    AutoSwitch,
    InjectionJournal,
    InjectionRules,
    QuietHours,
    last_switch,
    switch,
    veto,
)
from penstock.workloads.goals.injector.injector import AskedPolicy, Drifted, Gate, Injector
from penstock.workloads.goals.injector.injector_view import as_text, explain
from penstock.workloads.goals.live_host import Commands, Executor, read_commands

OPERATOR: Final = "operator"
"""Who uses the command line, in the files of a folder."""


def main(
    lifecycle: Lifecycle,
    settings: Settings,
    *,
    folder: Path,
    server: str,
    policy: str,
    goals: Path | None,
    simulated: int | None,
    auto: bool,
    threshold: float,
    explore: float,
    interval_s: float,
    quiet: Sequence[str],
    daily_limit: int,
    veto_s: float,
    steps: int,
    client_key: str,
    seed: int | None,
    resume: bool,
    as_json: bool,
) -> int:
    """Inject until the process is to end; returns 1 where it has stopped itself."""
    executor, safe = _executor(goals, simulated)
    gate = Gate(threshold=threshold, explore=explore, safe=safe)
    rules = InjectionRules(interval_s=interval_s, daily_limit=daily_limit, quiet=_hours(quiet), veto_s=veto_s)
    with (
        _client(settings, server, policy) as client,
        InjectionJournal.held(folder) as journal,
        lifecycle.calling_on_drain(client.close),
    ):
        _tell_switch(folder, auto=auto)
        since = journal.start_again(allowed=resume)
        asked = AskedPolicy(client, client_key, History(executor.goals).width, executor.goals)
        injector = Injector(
            policy=asked, executor=executor, journal=journal,
            switch=AutoSwitch(folder, default=auto), gate=gate, rules=rules,
            random=np.random.default_rng(seed), pause=lifecycle.draining.wait,
            draining=lifecycle.draining.is_set, drift_since=since,
        )  # fmt: skip
        code = _work(injector, steps)
    _tell(dict(injector.counts), as_json=as_json)
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


def _work(injector: Injector, steps: int) -> int:
    injector.recover()
    try:
        injector.run(steps)
    except Drifted as error:
        sys.stderr.write(f"injecting has stopped: {error}; look with --explain, then start with --resume\n")
        return EXIT_FAILED
    return EXIT_OK


def _executor(goals: Path | None, simulated: int | None) -> tuple[Executor, tuple[bool, ...]]:
    if (goals is None) == (simulated is None):
        raise ConfigurationError("--goals FILE or --simulated SEED: name one of them")
    if goals is not None:
        file = read_commands(goals)
        return Commands(file, acts=True), (False, *(one.safe for one in file.goal))
    host = SimulatedHost()
    host.reset(simulated or 0)
    return host, (False, *(True for _ in host.goals))


def _hours(quiet: Sequence[str]) -> tuple[QuietHours, ...]:
    try:
        return tuple(map(QuietHours.parse, quiet))
    except ValueError as error:
        raise ConfigurationError(f"--quiet: {error}") from error


def _client(settings: Settings, server: str, policy: str) -> PolicyClient:
    try:
        return PolicyClient(server, credentials=credentials(settings.security), policy=policy)
    except ValueError as error:
        raise ConfigurationError(f"--server {server}: {error}") from error


def _tell_switch(folder: Path, *, auto: bool) -> None:
    """Say where the switch of the folder counts more than the option."""
    found = last_switch(folder)
    if found is not None and found.on != auto:
        sys.stderr.write(
            f"auto is {'on' if found.on else 'off'} in {folder}, as it was switched; --switch changes that\n"
        )


def _tell(counts: dict[str, int], *, as_json: bool) -> None:
    text = ", ".join(f"{count} {name}" for name, count in counts.items()) or "nothing was done"
    sys.stdout.write((json.dumps(counts) if as_json else text) + "\n")
