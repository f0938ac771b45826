"""What `penstock inject` does: its parts from options, and its life as a process."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from penstock.client import PolicyClient
from penstock.config.configuration_error import ConfigurationError
from penstock.config.credentials import credentials
from penstock.config.settings import Settings
from penstock.runtime.exit import EXIT_FAILED, EXIT_OK
from penstock.runtime.lifecycle import Lifecycle
from penstock.workloads.goals.executors.commands import Commands, read_commands
from penstock.workloads.goals.executors.executor import Executor
from penstock.workloads.goals.executors.simulated import History, SimulatedHost
from penstock.workloads.goals.injector.asked_policy import AskedPolicy
from penstock.workloads.goals.injector.injection_journal import InjectionJournal, veto
from penstock.workloads.goals.injector.injection_records import InjectionRules, QuietHours
from penstock.workloads.goals.injector.injector import (
    AutoSwitch,
    Drifted,
    Gate,
    Injector,
    last_switch,
    switch,
)
from penstock.workloads.goals.injector.injector_view import as_text, explain

OPERATOR: Final = "operator"
"""Who uses the command line, in the files of a folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The options of the command."""

    folder: Path
    server: str
    policy: str
    goals: Path | None
    simulated: int | None
    auto: bool
    threshold: float
    explore: float
    interval_s: float
    quiet: tuple[str, ...]
    daily_limit: int
    veto_s: float
    steps: int
    client_key: str
    seed: int | None
    resume: bool


def main(lifecycle: Lifecycle, settings: Settings, request: Request, *, as_json: bool) -> int:
    """Inject until the process is to end; returns 1 where it has stopped itself."""
    executor, safe = _executor(request)
    rules, gate = _rules(request), Gate(threshold=request.threshold, explore=request.explore, safe=safe)
    with (
        _client(settings, request) as client,
        InjectionJournal.held(request.folder) as journal,
        lifecycle.calling_on_drain(client.close),
    ):
        _tell_switch(request)
        since = journal.start_again(allowed=request.resume)
        policy = AskedPolicy(client, request.client_key, History(executor.goals).width, executor.goals)
        injector = Injector(
            policy=policy, executor=executor, journal=journal,
            switch=AutoSwitch(request.folder, default=request.auto), gate=gate, rules=rules,
            random=np.random.default_rng(request.seed), pause=lifecycle.draining.wait,
            draining=lifecycle.draining.is_set, drift_since=since,
        )  # fmt: skip
        code = _work(injector, request.steps)
    _tell(dict(injector.counts), as_json=as_json)
    return code


def once(folder: Path, *, wanted: str | None, forbidden: str | None, as_json: bool) -> int:
    """Switch carrying out, else forbid a goal, else print what became of the goals of a folder."""
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


def _executor(request: Request) -> tuple[Executor, tuple[bool, ...]]:
    """Return what carries goals out, and which actions are safe to try."""
    if (request.goals is None) == (request.simulated is None):
        raise ConfigurationError("--goals FILE or --simulated SEED: name one of them")
    if request.goals is not None:
        file = read_commands(request.goals)
        return Commands(file, acts=True), (False, *(one.safe for one in file.goal))
    host = SimulatedHost()
    host.reset(request.simulated or 0)
    return host, (False, *(True for _ in host.goals))


def _rules(request: Request) -> InjectionRules:
    try:
        quiet = tuple(QuietHours.parse(one) for one in request.quiet)
    except ValueError as error:
        raise ConfigurationError(f"--quiet: {error}") from error
    return InjectionRules(
        interval_s=request.interval_s, daily_limit=request.daily_limit, quiet=quiet,
        veto_s=request.veto_s,
    )  # fmt: skip


def _client(settings: Settings, request: Request) -> PolicyClient:
    try:
        return PolicyClient(request.server, credentials=credentials(settings.security), policy=request.policy)
    except ValueError as error:
        raise ConfigurationError(f"--server {request.server}: {error}") from error


def _tell_switch(request: Request) -> None:
    """Say where the switch of the folder counts more than the option."""
    found = last_switch(request.folder)
    if found is not None and found.on != request.auto:
        sys.stderr.write(
            f"auto is {'on' if found.on else 'off'} in {request.folder}, as it was switched; --switch "
            "changes that\n"
        )


def _tell(counts: dict[str, int], *, as_json: bool) -> None:
    text = ", ".join(f"{count} {name}" for name, count in counts.items()) or "nothing was done"
    sys.stdout.write((json.dumps(counts) if as_json else text) + "\n")
