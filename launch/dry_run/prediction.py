"""Time, memory and disk of a whole run, from calibrations of it. No clock, no file: numbers in, numbers out.

    time     preparation + start + warm-up + steps · seconds per step + evaluations + checkpoints + end
    memory   peaks of the processes, and the experience that is kept
    disk     the files that lay in the folder, and those that grew with the steps

Each is for all of `learner.total_steps`: a run that reaches its target, or loses its patience, ends sooner.
low and high are the lowest and highest that was measured, with `estimate.MARGIN` beyond; a part that may take
nothing or all, such as an evaluation beside the training, is estimated as half.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from launch.dry_run.calibration import Calibration
from launch.dry_run.pace import Pace
from penstock.config.estimate import Range, total

AOF_REWRITE_BYTES: Final = 64 * 1024 * 1024
"""Redis rewrites its append-only file once it is this large and has doubled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The parts of the configuration that determine a prediction.

    evaluates_base: whether the policy that training begins with is played beside it. longest_episode: None:
    not known. remembered_steps: kept to learn from again.
    """

    total_steps: int
    checkpoint_interval_s: float
    checkpoints_kept: int
    evaluation_interval_steps: int | None
    evaluates_base: bool
    keep_every_updates: int | None
    longest_episode: int | None
    remembered_steps: int
    record_max_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The prediction for one run.

    time: seconds of each part, in order.
    memory: bytes of all processes together; roles: likely, of each kind.
    device_memory: bytes on GPUs, None without one.
    disk: bytes of each entry of the run's folder.
    """

    time: Mapping[str, Range]
    seconds_per_step: Range
    memory: Range
    roles: Mapping[str, int]
    device_memory: Range | None
    disk: Mapping[str, Range]

    @property
    def seconds(self) -> Range:
        """Return the seconds from the start of the command to the end of the last process."""
        return total(self.time.values())

    @property
    def disk_bytes(self) -> Range:
        """Return the bytes of the run's folder at its end."""
        return total(self.disk.values())


def predict(
    facts: Facts,
    calibrations: Sequence[Calibration],
    preparation: Range,
    prepared_bytes: int,
    device_memory: int | None,
) -> Prediction:
    """Return the prediction.

    Args:
        facts: of the configuration.
        calibrations: at least one, the longest last.
        preparation: seconds.
        prepared_bytes: bytes that the preparation leaves on disk.
        device_memory: most bytes on GPUs that were seen; None without one.
    """
    last = calibrations[-1]
    per_step = _seconds_per_step(calibrations)
    learning, checkpoints = _learning(facts, last, per_step)
    evaluation = _evaluation(facts, calibrations)
    between = (
        (facts.total_steps - 1) // facts.evaluation_interval_steps if facts.evaluation_interval_steps else 0
    )
    beside = between + facts.evaluates_base
    parts = {
        "preparation": preparation,
        "start": Range.of([one.startup_seconds for one in calibrations], last.startup_seconds),
        "learning": learning,
        "checkpoints": checkpoints,
        "evaluations beside it": Range(
            low=0.0, likely=beside * evaluation.likely / 2, high=beside * evaluation.high
        ),
        "last evaluation": evaluation,
        "end": Range.of([one.ending_seconds for one in calibrations], last.ending_seconds),
    }
    return Prediction(
        time=parts,
        seconds_per_step=per_step,
        memory=_memory(facts, calibrations),
        roles={role: memory.peak for role, memory in last.memory.items()},
        device_memory=None if device_memory is None else Range.of([float(device_memory)]),
        disk={"preparation": Range.of([prepared_bytes])} | _disk(facts, calibrations, between),
    )


def _seconds_per_step(calibrations: Sequence[Calibration]) -> Range:
    """Return the pace of the last calibration, with the spread of all whose processes had started.

    A machine is busier at some times than at others.
    """
    last = calibrations[-1]
    if last.pace is None:
        return Range.of([last.training_seconds / max(last.steps, 1)])
    found = [last.pace, *(one.pace for one in calibrations if one.pace is not None and one.pace.settled)]
    return Range(
        low=min(pace.seconds_per_step.low for pace in found),
        likely=last.pace.seconds_per_step.likely,
        high=max(pace.seconds_per_step.high for pace in found),
    )


def _learning(facts: Facts, last: Calibration, per_step: Range) -> tuple[Range, Range]:
    """Return the seconds of the updates, and of the checkpoints between them and behind the last."""
    if last.pace is None:
        # All of the run was its calibration.
        return Range.of([last.training_seconds]), Range.exactly(0.0)
    pace = last.pace
    learning = per_step.times(max(0, facts.total_steps - pace.warmup_steps)) + Range.of([pace.warmup_seconds])
    count = 1 + _checkpoints(facts, pace, learning.likely)
    return learning, Range.of([pace.checkpoint_seconds]).times(count)


def _checkpoints(facts: Facts, pace: Pace, seconds: float) -> int:
    """Return the number of checkpoints in that time; with an interval of 0 each update makes one."""
    updates = int(facts.total_steps / pace.steps_per_update)
    return (
        min(updates, int(seconds / facts.checkpoint_interval_s)) if facts.checkpoint_interval_s else updates
    )


def _evaluation(facts: Facts, calibrations: Sequence[Calibration]) -> Range:
    """Return the measured seconds as the low estimate.

    The high one assumes that every episode becomes as long as it can.
    """
    if calibrations[-1].pace is None:
        return Range.exactly(0.0)
    paces = [one.pace for one in calibrations if one.pace is not None]
    measured = Range.of([pace.evaluation_seconds for pace in paces], paces[-1].evaluation_seconds)
    length = paces[-1].episode_length
    if facts.longest_episode is None or not length:
        return measured
    longest = measured.high * max(1.0, facts.longest_episode / length)
    return Range(low=measured.low, likely=(measured.likely + longest) / 2, high=longest)


def _memory(facts: Facts, calibrations: Sequence[Calibration]) -> Range:
    last = calibrations[-1]
    peaks = [float(one.all_memory.peak) for one in calibrations]
    measured = Range.of(peaks, peaks[-1])
    if last.pace is None:
        return measured
    growth = _log_growth(facts, last, last.pace) + _remembered_growth(facts, calibrations)
    return measured + Range(low=0.0, likely=growth, high=growth)


def _log_growth(facts: Facts, last: Calibration, pace: Pace) -> float:
    """Return the bytes by which the log grows beyond the calibration's.

    Experience stays in Redis for two checkpoints, or as long as it is remembered.
    """
    between = 2 * facts.checkpoint_interval_s / max(pace.seconds_per_step.likely, 1e-9)
    kept = min(facts.total_steps, max(between, facts.remembered_steps))
    return pace.log_bytes_per_step * max(0.0, kept - last.steps)


def _remembered_growth(facts: Facts, calibrations: Sequence[Calibration]) -> float:
    """Return the bytes by which the learner's memory of steps grows.

    Two calibrations tell what a step takes.
    """
    first, last = calibrations[0], calibrations[-1]
    if not facts.remembered_steps or last.steps <= first.steps:
        return 0.0
    grown = last.memory["learner"].peak - first.memory["learner"].peak
    still = min(facts.total_steps, facts.remembered_steps) - last.steps
    return max(0.0, grown / (last.steps - first.steps)) * max(0, still)


def _disk(facts: Facts, calibrations: Sequence[Calibration], evaluations: int) -> dict[str, Range]:
    last = calibrations[-1]
    found = {name: Range.of([_grown(facts, calibrations, name)]) for name in sorted(last.disk)}
    # One more than are kept while it is being written.
    found["checkpoints"] = Range.of([last.checkpoint_bytes * (facts.checkpoints_kept + 1)])
    if "redis" in found:
        found["redis"] = _append_only_file(facts, last, found["redis"])
    if "record" in found:
        found["record"] = found["record"].at_most(Range.exactly(facts.record_max_bytes))
    if "policies" in found:
        updates = facts.total_steps / last.pace.steps_per_update if last.pace else 0.0
        periodic = updates // facts.keep_every_updates if facts.keep_every_updates else 0.0
        best = Range(low=0.0, likely=evaluations / 2, high=float(evaluations))
        found["policies"] = Range.of([last.disk["policies"]]) + (Range.exactly(periodic) + best).times(
            last.version_bytes
        )
    return found


def _append_only_file(facts: Facts, last: Calibration, grown: Range) -> Range:
    """Return the bytes of the append-only file.

    It grows until Redis rewrites it, which leaves what Redis holds; during the rewrite both files exist.
    """
    held = (last.pace.log_bytes_per_step if last.pace else 0.0) * max(last.steps, facts.remembered_steps)
    held += 2 * last.version_bytes
    most = max(AOF_REWRITE_BYTES, 2 * held)
    if grown.likely <= most:
        return grown
    return Range(low=held, likely=(held + most) / 2, high=held + most)


def _grown(facts: Facts, calibrations: Sequence[Calibration], name: str) -> float:
    """Return the bytes at the end, where growth between the calibrations continues at its rate."""
    first, last = calibrations[0], calibrations[-1]
    if last.steps <= first.steps:
        return last.disk[name]
    slope = max(0, last.disk[name] - first.disk.get(name, 0)) / (last.steps - first.steps)
    return last.disk[name] + slope * max(0, facts.total_steps - last.steps)
