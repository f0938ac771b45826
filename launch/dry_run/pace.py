"""The pace of a run from the lines of its `metrics.jsonl`.

    first experience ─ warm-up ─┬─ block ─┬─ block ─┬─ … ─┬─ last line of learning ─ evaluation,
                                                                                     checkpoint ─ last line

The warm-up lasts until the second update is done, which contains compilation, caches and first allocations,
and until the last process of the run has started, which takes its share of the processors. The rest is cut
into blocks of equal steps: their spread is that of the pace. Time spent on checkpoints is subtracted and
reported separately.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Final

from penstock.config.estimate import Range

WARMUP_UPDATES: Final = 2
BLOCKS: Final = 6
_LEAST_POINTS: Final = 2


class TooShort(ValueError):
    """Reports a calibration with too few updates to tell a pace."""


@dataclass(frozen=True, slots=True)
class Point:
    """The state of a run at one line: training seconds without those of checkpoints, steps, updates."""

    seconds: float
    steps: int
    updates: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The pace of a run: warmup_seconds until warmup_steps, then seconds_per_step, over measured_seconds.

    settled_seconds: of training when the last process had started. settled: whether the pace is that of the
    time behind it. evaluation_seconds: of the one at the end. checkpoint_seconds: of one checkpoint.
    episode_length: mean of the last training episodes, None before the first. log_bytes_per_step: of
    experience in Redis.
    """

    warmup_seconds: float
    warmup_steps: int
    settled_seconds: float
    settled: bool
    measured_seconds: float
    measured_updates: int
    steps: int
    updates: int
    seconds_per_step: Range
    evaluation_seconds: float
    checkpoint_seconds: float
    episode_length: float | None
    log_bytes_per_step: float

    @property
    def steps_per_update(self) -> float:
        """Return the steps of an update over the whole calibration."""
        return self.steps / max(self.updates, 1)

    def steps_in(self, seconds: float) -> int:
        """Return the steps that so many seconds of training are likely to hold."""
        return self.warmup_steps + round(
            max(0.0, seconds - self.warmup_seconds) / self.seconds_per_step.likely
        )


def pace_of(rows: Sequence[dict[str, Any]], started_s: float) -> Pace:
    """Return the pace of a run that was trained to its last step.

    Raises TooShort. rows: lines of `metrics.jsonl`. started_s: when its last process had started, as `time`.
    """
    *_, last = rows or [{}]
    learning = _points(rows)
    # The line that is written when the run ends holds what came after the last update, too.
    warm = _growing([point for point in learning[:-1] if point.updates >= WARMUP_UPDATES])
    if len(warm) < _LEAST_POINTS:
        raise TooShort(f"{last.get('updates', 0)} updates in {len(rows)} lines of metrics.jsonl")
    settled_s = max(0.0, started_s - (last["time"] - last["training_seconds"]))
    behind = [point for point in warm if point.seconds >= settled_s]
    settled = len(behind) >= _LEAST_POINTS
    measured = behind if settled else warm
    first, end = measured[0], measured[-1]
    rate = (end.seconds - first.seconds) / (end.steps - first.steps)
    left_s = max(0.0, learning[-1].seconds - end.seconds - rate * (learning[-1].steps - end.steps))
    return Pace(
        warmup_seconds=first.seconds,
        warmup_steps=first.steps,
        settled_seconds=settled_s,
        settled=settled,
        measured_seconds=end.seconds - first.seconds,
        measured_updates=end.updates - first.updates,
        steps=learning[-1].steps,
        updates=learning[-1].updates,
        seconds_per_step=Range.of(_blocks(measured), rate),
        evaluation_seconds=left_s,
        checkpoint_seconds=float(last.get("checkpoint_seconds", 0.0)),
        episode_length=last.get("episode_length"),
        # Nothing was trimmed; lines of the first steps hold more than these, begun and not yet trained.
        log_bytes_per_step=max(row.get("log_bytes", 0) for row in rows) / learning[-1].steps,
    )


def _points(rows: Sequence[dict[str, Any]]) -> list[Point]:
    spent_s = accumulate(float(row.get("checkpoint_seconds", 0.0)) for row in rows)
    return [
        Point(row["training_seconds"] - checkpoints_s, row["env_steps"], row["updates"])
        for row, checkpoints_s in zip(rows, spent_s, strict=True)
    ]


def _growing(points: Sequence[Point]) -> list[Point]:
    """Return the points at which steps have been added since the one before."""
    return [*points[:1]] + [later for earlier, later in pairwise(points) if later.steps > earlier.steps]


def _blocks(points: Sequence[Point]) -> list[float]:
    """Return seconds per step of up to BLOCKS stretches of about as many steps."""
    whole = points[-1].steps - points[0].steps
    cuts = [points[0]]
    for point in points[1:]:
        if point.steps - points[0].steps >= len(cuts) * whole / BLOCKS:
            cuts.append(point)
    return [(b.seconds - a.seconds) / (b.steps - a.steps) for a, b in pairwise(cuts)]
