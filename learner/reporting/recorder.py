"""The files of a run's figures: `metrics.jsonl` while it learns, `learner.json` when it ends.

A line is written at most every INTERVAL_S, between two updates: it sums up the updates since the line
before. A resumed learner appends; its lines begin at the step of its checkpoint, so a reader takes the
later of two lines for the same step. A crash that loses the last lines loses nothing else.
"""

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self, TextIO

from safetensors.torch import save_file
from torch import Tensor

from penstock.broker.log.replies import Renewal
from penstock.config.settings import Settings
from penstock.learner.algorithms.algorithm import Update
from penstock.learner.batch import Batch
from penstock.learner.feed.source import LogBatch
from penstock.learner.ledger import Balance, Drop, Ledger
from penstock.learner.reporting.trackers.tracker import TrackedRun, Tracking, make_tracking
from penstock.protocol.messages import Episode
from penstock.runtime import metrics

INTERVAL_S: Final = 0.25

_GAUGES: Final = {
    "policy_loss": metrics.POLICY_LOSS,
    "value_loss": metrics.VALUE_LOSS,
    "entropy": metrics.ENTROPY_NATS,
    "kl_behaviour": metrics.KL_BEHAVIOUR_NATS,
    "clip_fraction": metrics.CLIP_FRACTION,
    "effective_sample_size": metrics.EFFECTIVE_SAMPLE_SIZE,
    "explained_variance": metrics.EXPLAINED_VARIANCE,
    "gradient_norm": metrics.GRADIENT_NORM,
    "learning_rate": metrics.LEARNING_RATE,
    "kl_proximal": metrics.KL_PROXIMAL_NATS,
    "engine_difference": metrics.ENGINE_DIFFERENCE_NATS,
    "clip_range": metrics.CLIP_RANGE,
    "entropy_coefficient": metrics.ENTROPY_COEFFICIENT,
    "sample_reuse": metrics.SAMPLE_REUSE,
    "masked_fraction": metrics.MASKED_FRACTION,
    "nll": metrics.IMITATION_NLL_NATS.labels("train"),
    "validation_nll": metrics.IMITATION_NLL_NATS.labels("validation"),
    "accuracy": metrics.IMITATION_ACCURACY.labels("train"),
    "validation_accuracy": metrics.IMITATION_ACCURACY.labels("validation"),
}


class Staleness:
    """Counts fragments by their staleness, in updates, at their turn."""

    def __init__(self, counts: Mapping[str, int] | None = None) -> None:
        self.counts = Counter({int(updates): count for updates, count in (counts or {}).items()})

    def add(self, staleness: Mapping[int, int]) -> None:
        """Count fragments by staleness."""
        self.counts.update(staleness)

    def state(self) -> dict[str, int]:
        """Return a JSON object for a checkpoint."""
        return {str(updates): count for updates, count in self.counts.items()}

    def quantiles(self) -> dict[str, int]:
        """Return p50, p99 and max in updates; zeros before the first fragment."""
        return {"p50": self._at(0.5), "p99": self._at(0.99), "max": max(self.counts, default=0)}

    def _at(self, quantile: float) -> int:
        wanted, seen = quantile * self.counts.total(), 0
        for age in sorted(self.counts):
            seen += self.counts[age]
            if seen >= wanted:
                return age
        return 0


@dataclass(slots=True)
class _Since:
    """Sums since the last line. Times in seconds."""

    env_steps: int
    at_s: float
    publish_s: float = 0.0
    checkpoint_s: float = 0.0
    wait_s: float = 0.0
    assemble_s: float = 0.0
    compute_s: float = 0.0
    staleness: Staleness = field(default_factory=Staleness)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressSnapshot:
    """The state of the run at a line, beside the sums."""

    training_seconds: float
    env_steps: int
    updates: int
    version: int
    publications: int
    episodes: int
    mean_return: float | None
    episode_length: float | None
    publish_s: float
    checkpoint_s: float
    log_bytes: int
    outstanding: int
    budget: int
    evaluated: Mapping[str, float] = field(default_factory=dict)
    """`Evaluation.figures`."""


class Recorder:
    """Writes the lines of `metrics.jsonl`; used by the loop's thread.

    Args:
        run_dir: folder of the run.
        staleness: of the whole run.
        env_steps: environment steps at which this learner begins.
        tracking: receives every line too.
    """

    def __init__(
        self, run_dir: Path, staleness: Staleness, env_steps: int, tracking: Tracking | None = None
    ) -> None:
        self._run_dir = run_dir
        self._tracking = tracking
        self._file = _open_at_line(run_dir / "metrics.jsonl")
        self._since = _Since(env_steps, time.monotonic())
        self._last: dict[str, float] = {}
        self.staleness = staleness

    @classmethod
    def of_run(cls, settings: Settings, run_dir: Path, env_steps: int, staleness: Mapping[str, int]) -> Self:
        """Return the recorder of a run with these settings, which passes lines to its trackers.

        staleness: as `Staleness.state` gave it.
        """
        place = TrackedRun(settings=settings, run_dir=run_dir, first_step=env_steps)
        tracking = make_tracking(place) if settings.metrics.trackers else None
        return cls(run_dir, Staleness(staleness), env_steps, tracking)

    def updated(
        self,
        log_batch: LogBatch,
        values: Mapping[str, float],
        *,
        update: int,
        wait_s: float,
        compute_s: float,
    ) -> None:
        """Count an update that was made from `log_batch`.

        Args:
            log_batch: the batch.
            values: the algorithm's metrics by name.
            update: the learner's count of updates.
            wait_s: seconds that the loop waited for the batch.
            compute_s: seconds of the update.
        """
        staleness = Counter(abs(update - made_with) for made_with in log_batch.updates)
        self.staleness.add(staleness)
        self._since.staleness.add(staleness)
        self._since.wait_s += wait_s
        self._since.assemble_s += log_batch.assemble_s
        self._since.compute_s += compute_s
        self._last = {**values, "mean_reward": log_batch.reward / max(log_batch.steps, 1)}
        metrics.MEAN_REWARD.set(self._last["mean_reward"])
        # Another machine's clock may be ahead of this one.
        age_s = max(0.0, time.time() - compute_s - log_batch.created_us / 1e6)
        metrics.BATCH_AGE_SECONDS.observe(age_s)
        metrics.UPDATE_SECONDS.labels("wait").observe(wait_s)
        metrics.UPDATE_SECONDS.labels("compute").observe(compute_s)
        for updates, count in staleness.items():
            for _ in range(count):
                metrics.STALENESS_UPDATES.observe(updates)
        for name, gauge in _GAUGES.items():
            if name in values:
                gauge.set(values[name])

    @property
    def last(self) -> Mapping[str, float]:
        """Return the figures of the newest update by name; empty before the first."""
        return self._last

    def write(self, snapshot: Callable[[], ProgressSnapshot], *, now: bool = False) -> None:
        """Write a line when one is due, or `now`."""
        elapsed = time.monotonic() - self._since.at_s
        if elapsed < INTERVAL_S and not now:
            return
        here = snapshot()
        line = self._line(here, max(elapsed, 1e-9))
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._tracking is not None:
            self._tracking.offer(line)
        self._since = _Since(here.env_steps, time.monotonic(), here.publish_s, here.checkpoint_s)

    def finish(self, account: Mapping[str, Any]) -> None:
        """Replace `learner.json` with the final account of this process."""
        temporary = self._run_dir / "learner.json.tmp"
        temporary.write_text(json.dumps(account, indent=2) + "\n")
        temporary.replace(self._run_dir / "learner.json")
        self._file.close()
        if self._tracking is not None:
            self._tracking.close()

    def _line(self, snapshot: ProgressSnapshot, elapsed: float) -> dict[str, Any]:
        since = self._since
        staleness = since.staleness.quantiles()
        return {
            "time": round(time.time(), 3),
            "training_seconds": round(snapshot.training_seconds, 3),
            "env_steps": snapshot.env_steps,
            "updates": snapshot.updates,
            "version": snapshot.version,
            "publications": snapshot.publications,
            "episodes": snapshot.episodes,
            "mean_return": snapshot.mean_return,
            "episode_length": snapshot.episode_length,
            "steps_per_second": round((snapshot.env_steps - since.env_steps) / elapsed, 1),
            **{f"staleness_{name}": value for name, value in staleness.items()},
            "wait_seconds": round(since.wait_s, 4),
            "assemble_seconds": round(since.assemble_s, 4),
            "compute_seconds": round(since.compute_s, 4),
            "publish_seconds": round(snapshot.publish_s - since.publish_s, 4),
            "checkpoint_seconds": round(snapshot.checkpoint_s - since.checkpoint_s, 4),
            "log_bytes": snapshot.log_bytes,
            "outstanding": snapshot.outstanding,
            "budget": snapshot.budget,
            **snapshot.evaluated,
            **self._last,
        }


def _open_at_line(path: Path) -> TextIO:
    """Open to append, behind a last line that a crash may have torn."""
    before = path.read_bytes() if path.exists() else b""
    torn = before != b"" and not before.endswith(b"\n")
    file = path.open("a", encoding="utf-8")
    if torn:
        file.write("\n")
    return file


def ledger_json(balance: Balance) -> dict[str, Any]:
    """Return the accounts as `learner.json` and the summary show them."""
    return {
        "acked": balance.acked,
        "trained": balance.trained,
        "dropped": balance.dropped,
        "resident": balance.resident,
        "balanced": balance.balanced,
    }


# ---- Seconds of training: from the first experience on, over all processes of a run.


class TrainingClock:
    """Counts seconds from `start` on. before: seconds of the processes before this one."""

    def __init__(self, before: float = 0.0) -> None:
        self._before = before
        self._since: float | None = None
        self._stopped: float | None = None

    def start(self, created_us: int) -> None:
        """Begin when the first experience was made, by its own clock where that is plausible."""
        if self._since is not None:
            return
        age = time.time() - created_us / 1e6
        plausible = created_us > 0 and not self._before and 0 <= age < 60
        self._since = time.monotonic() - (age if plausible else 0.0)

    def stop(self) -> None:
        """End the training: `seconds` stays as it is."""
        self._stopped = self.elapsed()

    def seconds(self) -> float:
        """Return the seconds of training until now, or until `stop`."""
        return self.elapsed() if self._stopped is None else self._stopped

    def elapsed(self) -> float:
        """Return the seconds until now, with those that follow the training."""
        return self._before + (0.0 if self._since is None else time.monotonic() - self._since)


# ---- The ledger as metrics.


def show_ledger(ledger: Ledger, renewal: Renewal) -> None:
    """Set all gauges as of one renewal and one position, so that a fragment which is in none of them shows.

    Counts of 0 are set as well: a series that begins with its first event does not show that it rose.
    """
    # What was booked beyond that renewal's head was acknowledged since.
    head = max(renewal.head, ledger.position)
    metrics.LEDGER_ACKED.set(renewal.acked + head - renewal.head)
    metrics.LEDGER_LOST.set(renewal.log_lost)
    metrics.LEDGER_RESIDENT.set(head - ledger.position)
    metrics.LEDGER_TRAINED.set(ledger.trained)
    for reason in Drop:
        metrics.LEDGER_DROPPED.labels(reason.value).set(ledger.dropped[reason.value])


# ---- Evidence of an update that was not finite: the batch itself, for later examination.

MOST_KEPT: Final = 16


def keep_evidence(folder: Path, log_batch: LogBatch, update: Update, count: int) -> str:
    """Write the batch and its origin; returns the path without its endings.

    Args:
        folder: folder to write into.
        log_batch: the batch.
        update: the update that was not finite.
        count: number of updates made, for the name of the file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    base = folder / f"nan-{count:08d}-{log_batch.last}"
    origin = {
        "entries": list(log_batch.trained),
        "updates": list(log_batch.updates),
        "versions": list(log_batch.versions),
        "metrics": update.metrics,
    }
    base.with_suffix(".json").write_text(json.dumps(origin) + "\n")
    if log_batch.batch is not None:
        save_file(_tensors(log_batch.batch), base.with_suffix(".safetensors"))
    _drop_older(folder)
    return str(base)


def _drop_older(folder: Path) -> None:
    """Remove the oldest batches, by the last log entry in their names, beyond `MOST_KEPT`."""
    kept = sorted(folder.glob("nan-*.json"), key=lambda path: int(path.stem.rpartition("-")[2]))
    for path in kept[:-MOST_KEPT]:
        path.with_suffix(".safetensors").unlink(missing_ok=True)
        path.unlink()


def _tensors(batch: Batch) -> dict[str, Tensor]:
    named = {
        name: getattr(batch, name)
        for name in (
            "reward",
            "terminated",
            "truncated",
            "valid",
            "log_prob",
            "final_slot",
            "final_step",
            "update",
        )
    }
    named |= batch.observation | batch.action
    named |= {f"final/{name}": tensor for name, tensor in batch.final_observation.items()}
    return {name: tensor.cpu().contiguous() for name, tensor in named.items()}


# ---- `episodes.jsonl` of a run's folder: a line for each training episode, as actors report them.

EPISODES: Final = "episodes.jsonl"
BEFORE: Final = "episodes.1.jsonl"
MOST_BYTES: Final = 64 * 2**20

log = logging.getLogger(__name__)


class EpisodeLog:
    """Appends to the file of one run. What the disk does not take is lost, and said once."""

    def __init__(self, run_dir: Path, most_bytes: int = MOST_BYTES) -> None:
        self._file, self._before = run_dir / EPISODES, run_dir / BEFORE
        self._most, self._fails = most_bytes, False

    def add(self, first: int, episodes: Iterable[Episode]) -> None:
        """Add episodes. first: number of the first of them in the run, from 1."""
        now = round(time.time(), 3)
        text = "".join(
            json.dumps(
                {
                    "episode": number,
                    "time": now,
                    "return": episode.episode_return,
                    "length": episode.length,
                    "terminated": episode.terminated,
                    "version": episode.version,
                }
            )
            + "\n"
            for number, episode in enumerate(episodes, first)
        )
        try:
            with self._file.open("a") as file:
                file.write(text)
                is_full = file.tell() > self._most
            if is_full:
                self._file.replace(self._before)
        except OSError as error:
            if not self._fails:
                log.warning("episodes are not written", extra={"why": str(error)})
            self._fails = True
