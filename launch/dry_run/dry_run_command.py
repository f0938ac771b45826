"""`penstock train CONFIG --dry-run`: predict what the run will take, before it is begun.

    rehearse the preparation → calibrate until the pace is known → predict → print → store → refuse what
    will not fit

Everything is made in one folder beside the run's, which is removed however this ends. Exit 0 where it fits, 1
where it does not or a calibration failed, 130 when it was interrupted.
"""

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from launch.dry_run.calibration import Calibration, calibrate, shortened, with_artefacts
from launch.dry_run.limits import judge, look
from launch.dry_run.pace import Pace
from launch.dry_run.prediction import Facts, predict
from launch.dry_run.report import DryRun, lines, to_json
from launch.run import stored_prediction
from launch.run.disk import sizes
from launch.run.live_view import make_view
from launch.run.memory import DeviceMemory
from launch.run.plan import Plan
from penstock.config.estimate import Range
from penstock.config.preparation import Progress, Rehearsal
from penstock.config.settings import ConfigurationError
from penstock.config.workload import find, load
from penstock.runtime import logs
from penstock.runtime.exit import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, Fatal
from penstock.runtime.lifecycle import Lifecycle
from penstock.runtime.retry import Interrupted

MEASURED_S: Final = 20.0
"""Seconds for which the pace should be measured."""
ENOUGH_S: Final = 10.0
"""Seconds that suffice; slow updates reach them with a few."""
ENOUGH_UPDATES: Final = 2
FIRST_UPDATES: Final = 5
"""Least from which a pace is told: two warm up, and what the last one took is not told apart from the end."""
FIRST_S: Final = 20.0
"""Seconds of training after which the first calibration ends: slow updates are made a few times in all."""
SECOND_UPDATES: Final = 8
LEAST_CALIBRATIONS: Final = 2
MOST_CALIBRATIONS: Final = 4
_LEAST_STEPS: Final = 2048
_FOLDER_PREFIX: Final = ".penstock-dry-run-"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """The result of the rehearsal. plan: with every file named that was made.

    seconds: of the whole preparation of the run. size: bytes on disk.
    """

    plan: Plan
    rehearsal: Rehearsal
    seconds: Range
    size: int


def check(plan: Plan, *, recording: bool, ui: bool) -> None:
    """Raise ConfigurationError for runs that a dry run cannot predict.

    recording, ui: whether the user asked for a recording or the page.
    """
    if plan.resumption.resume:
        raise ConfigurationError(
            "--dry-run --resume: a run that has begun says itself what it takes, see its summary.json; "
            "leave one of both out"
        )
    if recording:
        raise ConfigurationError(
            "--dry-run --from: a recording is as long as it is, and there are no actors; leave one of "
            "both out"
        )
    if plan.settings.serving.listen:
        raise ConfigurationError(
            "--dry-run --serve: clients set the pace of such a run, and none would come; leave one of "
            "both out"
        )
    if plan.settings.broker.redis:
        raise ConfigurationError(
            "--dry-run --redis: calibrations would write to that Redis; leave it out to be told of an "
            "embedded one"
        )
    if ui:
        raise ConfigurationError("--dry-run --ui: there is no run to be watched; leave one of both out")
    if plan.settings.learner.total_steps is None:
        raise ConfigurationError("--dry-run: a run without end takes any time; say --total-steps")


def main(plan: Plan, *, named: bool, as_json: bool) -> int:
    """Predict the run and print the result; returns the exit code.

    Args:
        plan: of the run.
        named: whether the user said which folder the run shall have.
        as_json: print JSON instead of lines.
    """
    lifecycle = Lifecycle("launcher")
    lifecycle.install()
    file = stored_prediction.place_of(plan, named=named)
    try:
        with (
            _scratch(plan.run_dir) as folder,
            logs.at_end_of(
                folder / "launcher.log", "launcher", plan.settings.run, style=plan.settings.logs.format
            ),
        ):
            found = _dry_run(plan, folder, lifecycle, as_json=as_json)
    except Interrupted:
        sys.stderr.write("interrupted: nothing of the dry run is left\n")
        return EXIT_INTERRUPTED
    content = to_json(found)
    stored_prediction.write(file, content)
    text = [json.dumps(content, indent=2)] if as_json else lines(found, file)
    sys.stdout.write("\n".join(text) + "\n")
    sys.stdout.flush()
    if found.verdict.refused:
        sys.stderr.write(f"it will not fit: {'; '.join(found.verdict.refused)}\n")
        return EXIT_FAILED
    return EXIT_OK


@contextmanager
def _scratch(run_dir: Path) -> Iterator[Path]:
    """Yield a folder in the file system of the run's, whose speed is part of the measurement."""
    place = next(folder for folder in run_dir.parents if folder.is_dir())
    folder = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX, dir=place))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _dry_run(plan: Plan, folder: Path, lifecycle: Lifecycle, *, as_json: bool) -> DryRun:
    limits = look(plan.run_dir)
    device = DeviceMemory()
    try:
        prepared = _rehearse(plan, folder / "prepared", lifecycle, as_json=as_json)
        calibrations = _calibrate(prepared.plan, folder, lifecycle, as_json=as_json)
    finally:
        device.close()
    prediction = predict(
        _facts(plan, calibrations[-1].pace), calibrations, prepared.seconds, prepared.size, device.peak
    )
    last = calibrations[-1]
    return DryRun(
        plan=plan,
        calibrations=calibrations,
        prediction=prediction,
        limits=limits,
        verdict=judge(prediction, limits),
        scores={**prepared.rehearsal.scores, "returns": last.returns},
    )


def _rehearse(plan: Plan, folder: Path, lifecycle: Lifecycle, *, as_json: bool) -> _Prepared:
    """Rehearse the preparation of the run's workload in short.

    Without a rehearsal of its own, do all of it.
    """
    workload, began_s = find(plan.settings.workload), time.monotonic()
    folder.mkdir()
    rehearsal = Rehearsal(settings=plan.settings)
    stream = sys.stderr if as_json else sys.stdout
    with make_view(stream, "rehearsal", None, None) as view:
        progress = Progress(view.event, lifecycle.draining)
        if workload.rehearse:
            rehearsal = load(workload.rehearse)(plan.settings, folder, progress)
        elif workload.prepare:
            rehearsal = Rehearsal(settings=load(workload.prepare)(plan.settings, folder, progress))
    short_s = sum(one.seconds for one in rehearsal.shortened)
    seconds = Range.of([time.monotonic() - began_s - short_s])
    for one in rehearsal.shortened:
        seconds += one.whole_seconds
    return _Prepared(
        plan=replace(plan, settings=rehearsal.settings),
        rehearsal=rehearsal,
        seconds=seconds,
        size=sum(sizes(folder).values()),
    )


def _calibrate(plan: Plan, folder: Path, lifecycle: Lifecycle, *, as_json: bool) -> list[Calibration]:
    """Run a short calibration that finds the pace roughly, and another that is long enough to measure it."""
    stream = sys.stderr if as_json else sys.stdout
    total_steps = plan.settings.learner.total_steps or 0
    steps = min(first_steps(plan), total_steps)
    plans, found = list[Plan](), list[Calibration]()
    while True:
        most_s = None if found else FIRST_S
        plans.append(shortened(plan, folder / f"calibration-{len(found) + 1}", steps, most_s))
        with make_view(stream, f"calibration {len(found) + 1}", steps, None) as view:
            found.append(calibrate(plans[-1], lifecycle, view))
        is_whole = found[-1].steps >= total_steps
        if is_whole or len(found) == MOST_CALIBRATIONS or is_enough(found):
            _check_pace(found[-1], total_steps)
            return [with_artefacts(*both) for both in zip(plans, found, strict=True)]
        steps = min(next_steps(found[-1], steps), total_steps)


def _check_pace(last: Calibration, total_steps: int) -> None:
    if last.pace is None and last.steps < total_steps:
        raise Fatal(
            f"--dry-run: {last.steps:,} of {total_steps:,} steps made too few updates to tell a pace; look "
            "at algorithm.batch_steps, or train without a dry run"
        )


def first_steps(plan: Plan) -> int:
    """Return the environment steps of a few updates of any algorithm."""
    algorithm = plan.settings.algorithm
    steps = algorithm.steps_before_updates + FIRST_UPDATES * algorithm.update_steps
    return max(steps, _LEAST_STEPS if not algorithm.update_steps else 0)


def is_enough(found: Sequence[Calibration]) -> bool:
    """Return whether the pace of the last calibration can be relied on.

    A single one does not tell what grows with the steps.
    """
    pace = found[-1].pace
    if len(found) < LEAST_CALIBRATIONS or pace is None or not pace.settled:
        return False
    return pace.measured_seconds >= ENOUGH_S and pace.measured_updates >= ENOUGH_UPDATES


def next_steps(one: Calibration, asked: int) -> int:
    """Return as many steps as take MEASURED_S at the pace known so far.

    asked: steps that the calibration should have made; where its time was over before, so many again.
    """
    if one.steps < asked:
        return asked
    pace = one.pace
    if pace is None:
        return 4 * one.steps
    seconds = MEASURED_S + (0.0 if pace.settled else pace.settled_seconds)
    measured = max(seconds / pace.seconds_per_step.likely, SECOND_UPDATES * pace.steps_per_update)
    return pace.warmup_steps + round(measured)


def _facts(plan: Plan, pace: Pace | None) -> Facts:
    settings = plan.settings
    total_steps = settings.learner.total_steps or 0
    if settings.learner.total_updates is not None and pace is not None:
        total_steps = min(total_steps, round(settings.learner.total_updates * pace.steps_per_update))
    if settings.learner.total_seconds is not None and pace is not None:
        total_steps = min(total_steps, pace.steps_in(settings.learner.total_seconds))
    longest = find(settings.workload).longest
    return Facts(
        total_steps=total_steps,
        checkpoint_interval_s=settings.learner.checkpoint_interval_s,
        checkpoints_kept=settings.learner.keep_checkpoints + settings.learner.keep_best,
        evaluation_interval_steps=settings.evaluation.interval_steps,
        evaluates_base=settings.evaluation.base,
        keep_every_updates=settings.learner.keep_every_updates,
        longest_episode=load(longest)(settings.environment) if longest else None,
        remembered_steps=settings.algorithm.remembered_steps,
        record_max_bytes=settings.learner.record_max_bytes,
    )
