"""`penstock train CONFIG --dry-run`: the minutes of a run and its peak memory, from a short run of it.

The preparation is rehearsed, then the run's own processes train for some seconds in a folder beside the
run's. The pace of their updates is extrapolated to all steps. The folder is removed however this ends.
"""

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, TextIO

from penstock.config.settings import ConfigurationError, LearnerSection, Progress, Rehearsal
from penstock.config.workload import find, load
from penstock.launch.inspection.curve import read_rows, shown, size, span
from penstock.launch.inspection.live_view import limits_of, make_view
from penstock.launch.run.fork_server import ForkServer
from penstock.launch.run.memory import DeviceMemory, Memory, available, device_memory, together
from penstock.launch.run.plan import Plan, changed, prepare_folder
from penstock.launch.run.run import Run
from penstock.launch.run.summary import RedisFacts, aligned
from penstock.runtime import logs
from penstock.runtime.exit import EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, Fatal
from penstock.runtime.lifecycle import Lifecycle
from penstock.runtime.retry import Interrupted

MEASURED_S: Final = 20.0
"""Seconds of training after which the short run ends."""
MOST_RUNS: Final = 4
"""Short runs at most: one with too few updates is repeated with twice its time."""
_FOLDER_PREFIX: Final = ".penstock-dry-run-"
_TIME_IS_OVER: Final = "seconds"
"""Value of `ending` for `learner.total_seconds`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Training so far, in seconds, steps and updates, and the seconds that a step takes from then on."""

    seconds: float
    steps: int
    updates: int
    seconds_per_step: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortRun:
    """A short run that has ended.

    wall_seconds: from the start of its processes to the end of the last. training_seconds: between its first
    experience and its last update. is_whole: the run itself is as short. pace: None for too few updates.
    memory: peaks in bytes by role.
    """

    wall_seconds: float
    training_seconds: float
    is_whole: bool
    pace: Pace | None
    memory: Mapping[str, Memory]


def check(plan: Plan, *, recording: bool, ui: bool) -> None:
    """Raise ConfigurationError for runs that cannot be predicted. recording, ui: the options are given."""
    refused = {
        "--resume: a run that has begun shows its pace in `penstock status`": plan.resumption.resume,
        "--from: a recording sets the end of the run, and there are no actors": recording,
        "--serve: clients set the pace of such a run": bool(plan.settings.serving.listen),
        "--redis: the short run would write to that Redis": bool(plan.settings.broker.redis),
        "--ui: there is no run to watch": ui,
    }
    for reason, is_given in refused.items():
        if is_given:
            raise ConfigurationError(f"--dry-run {reason}; leave one of both out")
    if plan.settings.learner.total_steps is None:
        raise ConfigurationError("--dry-run: a run without an end takes any time; set --total-steps")


def main(plan: Plan, *, as_json: bool) -> int:
    lifecycle = Lifecycle("launcher")
    lifecycle.install()
    stream = sys.stderr if as_json else sys.stdout
    try:
        with _scratch(plan) as folder:
            found = _dry_run(plan, folder, lifecycle, stream)
    except Interrupted:
        sys.stderr.write("interrupted: nothing of the dry run is left\n")
        return EXIT_INTERRUPTED
    text = json.dumps(found, indent=2) if as_json else "\n".join(lines(found))
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
    return EXIT_OK


@contextmanager
def _scratch(plan: Plan) -> Iterator[Path]:
    """Yield a folder in the file system of the run, whose speed is part of the measurement."""
    place = next(folder for folder in plan.run_dir.parents if folder.is_dir())
    folder = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX, dir=place))
    log, style = folder / "launcher.log", plan.settings.logs.format
    try:
        with logs.at_end_of(log, "launcher", plan.settings.run, style=style):
            yield folder
    finally:
        shutil.rmtree(folder)


def _dry_run(plan: Plan, folder: Path, lifecycle: Lifecycle, stream: TextIO) -> dict[str, Any]:
    """Return the object that --json prints. Seconds and bytes."""
    free, devices = available(), device_memory()
    with closing(DeviceMemory()) as device:
        began_s = time.monotonic()
        rehearsal = _rehearse(plan, folder / "prepared", lifecycle, stream)
        preparation_s = time.monotonic() - began_s + rehearsal.more_seconds
        short = _measure(replace(plan, settings=rehearsal.settings), folder, lifecycle, stream)
        device_peak = device.peak
    settings = plan.settings
    return {
        "environment": settings.environment.id,
        "workload": settings.workload,
        "seed": settings.seed,
        "total_steps": steps_of(settings.learner, short.pace),
        "seconds": round(preparation_s + predicted(settings.learner, short), 3),
        "preparation_seconds": round(preparation_s, 3),
        "measured": short.pace and asdict(short.pace),
        "memory_bytes": together(short.memory.values()).peak,
        "memory_bytes_by_role": {role: memory.peak for role, memory in short.memory.items()},
        "device_memory_bytes": device_peak,
        "available": {
            "memory_bytes": free,
            "device_memory_bytes": None if devices is None else devices[1] - devices[0],
        },
        "scores": {name: asdict(scores) for name, scores in rehearsal.scores.items()},
    }


def _rehearse(plan: Plan, folder: Path, lifecycle: Lifecycle, stream: TextIO) -> Rehearsal:
    """Make a short preparation, where the workload has one; else the whole preparation."""
    workload = find(plan.settings.workload)
    folder.mkdir()
    with make_view(stream, "preparation", {}, None) as view:
        progress = Progress(view.event, lifecycle.draining)
        if workload.rehearse:
            rehearsal: Rehearsal = load(workload.rehearse)(plan.settings, folder, progress)
            return rehearsal
        if workload.prepare:
            return Rehearsal(settings=load(workload.prepare)(plan.settings, folder, progress))
        return Rehearsal(settings=plan.settings)


def _measure(plan: Plan, folder: Path, lifecycle: Lifecycle, stream: TextIO) -> ShortRun:
    """Make a short run; again with twice the time where it made too few updates for a pace."""
    seconds = MEASURED_S
    for number in range(1, MOST_RUNS + 1):
        short_plan = shortened(plan, folder / f"run-{number}", seconds)
        found = _run(short_plan, lifecycle, stream)
        if found.pace is not None or found.is_whole:
            return found
        seconds = 2 * max(seconds, found.training_seconds)
    raise Fatal(
        f"--dry-run: {found.training_seconds:.0f} s of training made too few updates to measure their pace; "
        "lower algorithm.batch_steps, or train without a dry run"
    )


def shortened(plan: Plan, run_dir: Path, seconds: float) -> Plan:
    """Return the plan of a run of some seconds, with one evaluation and all files in a folder."""
    settings = plan.settings
    learner = {
        "total_seconds": min(seconds, settings.learner.total_seconds or seconds),
        "stop_at_target": False,
        "record": settings.learner.record and run_dir / "record",
    }
    settings = changed(
        settings,
        learner=learner,
        actor={"ack_journal": settings.actor.ack_journal and run_dir / "journals"},
        evaluation={"interval_steps": None, "patience": None, "base": False},
        metrics={"trackers": (), "port": 0},
        registry={"url": ""},
    )
    return replace(plan, settings=settings, run_dir=run_dir)


def _run(plan: Plan, lifecycle: Lifecycle, stream: TextIO) -> ShortRun:
    """Make a short run; raises Interrupted, and Fatal or ConfigurationError when it fails."""
    prepare_folder(plan)
    redis = RedisFacts(version="", durability=plan.settings.broker.durability)
    began_s = time.monotonic()
    with (
        make_view(stream, plan.run_dir.name, limits_of(plan.settings.learner), None) as view,
        closing(ForkServer()) as fork_server,
    ):
        run = Run(plan, lifecycle, view, redis, fork_server)
        outcome = run.go()
    wall_s = time.monotonic() - began_s
    if outcome.code == EXIT_INTERRUPTED:
        raise Interrupted
    if outcome.code != EXIT_OK:
        kind = ConfigurationError if outcome.code == EXIT_USAGE else Fatal
        raise kind(f"--dry-run: the short run failed as the run would: {outcome.cause}")
    roles: dict[str, list[Memory]] = {}
    for account in run.accounts():
        roles.setdefault(account.role, []).append(account.memory)
    return ShortRun(
        wall_seconds=wall_s,
        training_seconds=run.learnt["training_seconds"],
        is_whole=run.learnt["ending"] != _TIME_IS_OVER,
        pace=pace_of(read_rows(plan.run_dir / "metrics.jsonl")),
        memory={role: together(parts) for role, parts in roles.items()},
    )


def pace_of(rows: Sequence[Mapping[str, Any]]) -> Pace | None:
    """Return the pace of the later half of a run's lines, None for too few with an update.

    The first half is the warm-up. The last line, written when the run ends, holds the last evaluation, too.
    """
    points = list[Mapping[str, Any]]()
    for row in rows[:-1]:
        if row["updates"] and (not points or row["env_steps"] > points[-1]["env_steps"]):
            points.append(row)
    if len(points) < 2:
        return None
    first, last = points[(len(points) - 1) // 2], points[-1]
    seconds = last["training_seconds"] - first["training_seconds"]
    return Pace(
        seconds=last["training_seconds"],
        steps=last["env_steps"],
        updates=last["updates"],
        seconds_per_step=seconds / (last["env_steps"] - first["env_steps"]),
    )


def predicted(section: LearnerSection, short: ShortRun) -> float:
    """Return the seconds of the whole run, without its preparation."""
    pace, steps = short.pace, steps_of(section, short.pace)
    if short.is_whole or pace is None or steps is None:
        return short.wall_seconds
    learning_s = pace.seconds + pace.seconds_per_step * max(0, steps - pace.steps)
    if section.total_seconds is not None:
        learning_s = min(learning_s, section.total_seconds)
    return short.wall_seconds - pace.seconds + learning_s


def steps_of(section: LearnerSection, pace: Pace | None) -> int | None:
    """Return the steps of the whole run, fewer than `total_steps` where its updates end it before."""
    steps = section.total_steps
    if steps is None or pace is None or section.total_updates is None:
        return steps
    return min(steps, round(section.total_updates * pace.steps / pace.updates))


def lines(found: Mapping[str, Any]) -> list[str]:
    """Return the object of `_dry_run` as lines for people."""
    measured, free, device = found["measured"], found["available"], found["device_memory_bytes"]
    rows = [("time", f"{found['seconds'] / 60:,.1f} minutes")]
    if found["preparation_seconds"] >= 1:
        rows.append(("", f"{span(found['preparation_seconds'])} of them are preparation"))
    if measured is not None:
        text = (
            f"{measured['steps']:,} steps and {measured['updates']:,} updates in "
            f"{span(measured['seconds'])}, then {1 / measured['seconds_per_step']:,.1f} steps a second"
        )
        rows.append(("measured", text))
    roles = ", ".join(f"{role} {size(peak)}" for role, peak in found["memory_bytes_by_role"].items())
    rows.append(("memory", f"{size(found['memory_bytes'])} at most, {size(free['memory_bytes'])} are free"))
    rows.append(("", roles))
    if device is not None:
        rows.append(("GPU memory", f"{size(device)} at most, {size(free['device_memory_bytes'])} are free"))
    for name, scores in found["scores"].items():
        mean, std = shown(scores["mean"]), shown(scores["std"], scores["mean"])
        rows.append((name, f"{scores['count']:,} scores, mean {mean}, std {std}"))
    head = f"{found['environment']}: dry run of {found['total_steps']:,} steps (seed {found['seed']})"
    return [head, *aligned(rows)]
