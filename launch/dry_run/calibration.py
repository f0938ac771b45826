"""A calibration: the run itself, ended after a few updates, in a folder that is thrown away.

The processes and the configuration are the run's, except for what reaches outside or ends it early: no
trackers, one evaluation and one checkpoint at the end, which are measured apart; the policy that
training begins with is not played. `measure` then
reads the files that any run leaves: `metrics.jsonl`, `learner.json`, the accounts of the processes, the
folder.
"""

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from launch.dry_run.pace import Pace, TooShort, pace_of
from launch.run.disk import sizes
from launch.run.fork_server import ForkServer
from launch.run.learner_account import read_account
from launch.run.live_view import View
from launch.run.memory import Memory, together
from launch.run.plan import Plan, prepare_folder
from launch.run.progress import read_rows
from launch.run.run import Run
from launch.run.services import private_folder
from launch.run.summary import SUMMARY_FILE, Ending, RedisFacts, make_summary, write_summary
from launch.run.supervised_service import Account
from penstock.config.estimate import Scores
from penstock.config.settings import ConfigurationError
from penstock.config.workload import find, load
from penstock.runtime.exit import EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, Fatal
from penstock.runtime.lifecycle import Lifecycle
from penstock.runtime.retry import Interrupted

_NEVER_S: Final = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Measurements of one calibration. Sizes in bytes; disk: by entries of the run's folder.

    startup_seconds: until the first experience. training_seconds: from there to the learner's last line, with
    evaluation and checkpoint. ending_seconds: from there until all processes had ended. pace: None where it
    was too short.
    """

    startup_seconds: float
    training_seconds: float
    ending_seconds: float
    steps: int
    pace: Pace | None
    memory: Mapping[str, Memory]
    disk: Mapping[str, int]
    checkpoint_bytes: int
    version_bytes: int
    returns: Scores
    evaluation: Mapping[str, Any] | None

    @property
    def all_memory(self) -> Memory:
        """Return the memory of all processes together."""
        return together(self.memory.values())


@dataclass(frozen=True, slots=True)
class _MeasuredRun:
    began_s: float
    ended_s: float
    accounts: Sequence[Account]


def shortened(plan: Plan, run_dir: Path, steps: int, seconds: float | None = None) -> Plan:
    """Return the plan of the same run, ended after so many steps, in another folder.

    It has no effect outside of that folder. seconds: of training, behind which it ends, too.
    """
    settings = plan.settings
    learner = {
        "total_steps": steps,
        "total_updates": None,
        "total_episodes": None,
        "total_seconds": seconds,
        "episode_log": False,
        "stop_at_target": False,
        "checkpoint_interval_s": _NEVER_S,
        "record": settings.learner.record and run_dir / "record",
    }
    actor = {"ack_journal": settings.actor.ack_journal and run_dir / "journals"}
    changes = {
        "learner": settings.learner.model_copy(update=learner),
        "actor": settings.actor.model_copy(update=actor),
        "evaluation": settings.evaluation.model_copy(
            update={"interval_steps": None, "patience": None, "base": False}
        ),
        "metrics": settings.metrics.model_copy(update={"trackers": (), "port": 0}),
        "registry": settings.registry.model_copy(update={"url": ""}),
    }
    return replace(plan, settings=settings.model_copy(update=changes), run_dir=run_dir)


def calibrate(plan: Plan, lifecycle: Lifecycle, view: View) -> Calibration:
    """Run the plan to its end and measure it.

    Raises Interrupted, and Fatal or ConfigurationError when it fails.
    """
    prepare_folder(plan)
    sockets = private_folder()
    redis = RedisFacts(version="", durability=plan.settings.broker.durability)
    began_s = time.time()
    try:
        with closing(ForkServer()) as fork_server:
            run = Run(plan, sockets, lifecycle, view, redis, fork_server)
            outcome = run.go()
    finally:
        shutil.rmtree(sockets, ignore_errors=True)
    measured = _MeasuredRun(began_s, time.time(), run.accounts())
    if outcome.code == EXIT_INTERRUPTED:
        raise Interrupted
    if outcome.code != EXIT_OK:
        kind = ConfigurationError if outcome.code == EXIT_USAGE else Fatal
        raise kind(f"--dry-run: the calibration failed as the run would: {outcome.cause}")
    ending = Ending(
        wall_seconds=measured.ended_s - began_s,
        interrupted=False,
        cause="",
        accounts=measured.accounts,
        redis=run.redis_facts,
    )
    write_summary(plan.run_dir, make_summary(plan, ending, run.learnt))
    return measure(plan.run_dir, measured)


def with_artefacts(plan: Plan, calibration: Calibration) -> Calibration:
    """Add the files that the workload leaves at the end.

    This happens after the last calibration: the memory it takes is in no run.
    """
    path = find(plan.settings.workload).artefacts
    if not path:
        return calibration
    summary = json.loads((plan.run_dir / SUMMARY_FILE).read_text())
    load(path)(plan.settings, plan.run_dir, summary)
    return replace(calibration, disk=sizes(plan.run_dir))


def measure(run_dir: Path, measured: _MeasuredRun) -> Calibration:
    """Return the measurements of a run that has ended."""
    rows = read_rows(run_dir / "metrics.jsonl")
    last = rows[-1]
    first_s = last["time"] - last["training_seconds"]
    try:
        pace = pace_of(rows, _last_start(run_dir / "endpoints"))
    except TooShort:
        pace = None
    roles: dict[str, list[Memory]] = {}
    for account in measured.accounts:
        roles.setdefault(account.role, []).append(account.memory)
    return Calibration(
        startup_seconds=first_s - measured.began_s,
        training_seconds=last["training_seconds"],
        ending_seconds=measured.ended_s - last["time"],
        steps=last["env_steps"],
        pace=pace,
        memory={role: together(parts) for role, parts in roles.items()},
        disk=sizes(run_dir),
        checkpoint_bytes=max(sizes(run_dir / "checkpoints").values(), default=0),
        version_bytes=max(sizes(run_dir / "policies").values(), default=0),
        returns=Scores.of(_returns(run_dir / "checkpoints")),
        evaluation=read_account(run_dir).get("evaluation"),
    )


def _last_start(endpoints: Path) -> float:
    """Return when the last process announced its endpoint, as `time`."""
    return max((file.stat().st_mtime for file in endpoints.glob("*.json")), default=0.0)


def _returns(checkpoints: Path) -> list[float]:
    """Return the returns of the last training episodes, which the newest checkpoint holds."""
    states = sorted(checkpoints.glob("*/state.json"))
    return list(json.loads(states[-1].read_text())["episodes"].get("returns", ())) if states else []
