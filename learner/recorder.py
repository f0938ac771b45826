"""The figures of a run: `metrics.jsonl`, trackers of experiments, gauges, and `learner.json` at its end.

A line is written at most every INTERVAL_S, between two updates, and sums up the updates since the last line.
A resumed learner appends from the step of its checkpoint: of two lines of a step the later one is valid.
"""

import importlib.util
import json
import logging
import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from penstock.broker.log.replies import Renewal
from penstock.config.configuration_error import how_to_install
from penstock.config.settings import ConfigurationError, Settings
from penstock.learner.evaluation import Result, base_json, scores_json
from penstock.learner.feed.log_feed import LogBatch
from penstock.learner.ledger import Balance, Drop, Ledger, open_at_line
from penstock.learner.publish.kept_versions import FinalPolicy, name_final, write_final
from penstock.policy import weights
from penstock.runtime import metrics
from penstock.runtime.output_file import replace_file

if TYPE_CHECKING:
    from penstock.learner.learner import Learner

log = logging.getLogger(__name__)

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
        self.counts.update(staleness)

    def state(self) -> dict[str, int]:
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
    """Sums since the last line; times in seconds."""

    env_steps: int
    at_s: float
    publish_s: float = 0.0
    checkpoint_s: float = 0.0
    wait_s: float = 0.0
    assemble_s: float = 0.0
    compute_s: float = 0.0
    staleness: Staleness = field(default_factory=Staleness)


class Recorder:
    """Writes the lines of `metrics.jsonl`; used by the learner's thread.

    staleness: of the whole run. env_steps: at which this learner begins. tracking: receives every line too.
    """

    def __init__(
        self, run_dir: Path, staleness: Staleness, env_steps: int, tracking: "Tracking | None" = None
    ) -> None:
        self._run_dir = run_dir
        self._tracking = tracking or Tracking({})
        self._file = open_at_line(run_dir / "metrics.jsonl")
        self._since = _Since(env_steps, time.monotonic())
        self._last: dict[str, float] = {}
        self.staleness = staleness

    def updated(
        self,
        log_batch: LogBatch,
        values: Mapping[str, float],
        *,
        update: int,
        wait_s: float,
        compute_s: float,
    ) -> None:
        """Count an update from a batch.

        values: the algorithm's metrics by name. update: updates made before. wait_s, compute_s: seconds
        that the batch was waited for, and that the update took.
        """
        staleness = Counter(abs(update - made_with) for made_with in log_batch.updates)
        self.staleness.add(staleness)
        self._since.staleness.add(staleness)
        self._since.wait_s += wait_s
        self._since.assemble_s += log_batch.assemble_s
        self._since.compute_s += compute_s
        self._last = {**values, "mean_reward": log_batch.reward / max(log_batch.steps, 1)}
        metrics.MEAN_REWARD.set(self._last["mean_reward"])
        # The clock of another machine may be ahead of this one.
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
        return self._last

    def write(self, snapshot: Callable[[], Mapping[str, Any]], *, now: bool = False) -> None:
        elapsed = time.monotonic() - self._since.at_s
        if elapsed < INTERVAL_S and not now:
            return
        here = snapshot()
        line = self._line(here, max(elapsed, 1e-9))
        self._file.write(f"{json.dumps(line)}\n".encode())
        self._file.flush()
        self._tracking.offer(line)
        self._since = _Since(here["env_steps"], time.monotonic(), here["publish_s"], here["checkpoint_s"])

    def finish(self, account: Mapping[str, Any]) -> None:
        replace_file(self._run_dir / "learner.json", f"{json.dumps(account, indent=2)}\n".encode())
        self._file.close()
        self._tracking.close()

    def _line(self, snapshot: Mapping[str, Any], elapsed: float) -> dict[str, Any]:
        since, here = self._since, dict(snapshot)
        evaluated, publish_s, checkpoint_s = map(here.pop, ("evaluated", "publish_s", "checkpoint_s"))
        staleness = since.staleness.quantiles()
        return {
            "time": round(time.time(), 3),
            **here,
            "training_seconds": round(here["training_seconds"], 3),
            "steps_per_second": round((here["env_steps"] - since.env_steps) / elapsed, 1),
            **{f"staleness_{name}": value for name, value in staleness.items()},
            "wait_seconds": round(since.wait_s, 4),
            "assemble_seconds": round(since.assemble_s, 4),
            "compute_seconds": round(since.compute_s, 4),
            "publish_seconds": round(publish_s - since.publish_s, 4),
            "checkpoint_seconds": round(checkpoint_s - since.checkpoint_s, 4),
            **evaluated,
            **self._last,
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
        self._stopped = self.elapsed()

    def seconds(self) -> float:
        """Return the seconds of training until now, or until `stop`."""
        return self.elapsed() if self._stopped is None else self._stopped

    def elapsed(self) -> float:
        """Return the seconds until now, with those that follow the training."""
        return self._before + (0.0 if self._since is None else time.monotonic() - self._since)


# ---- The ledger as metrics.


def show_ledger(ledger: Ledger, renewal: Renewal) -> None:
    """Set all gauges as of one renewal and one position, so that a missing fragment shows in them.

    Counts of 0 are set, too: a series that begins with its first event does not show an increase.
    """
    # Entries after that renewal's head that are booked were acknowledged since.
    head = max(renewal.head, ledger.position)
    metrics.LEDGER_ACKED.set(renewal.acked + head - renewal.head)
    metrics.LEDGER_LOST.set(renewal.log_lost)
    metrics.LEDGER_RESIDENT.set(head - ledger.position)
    metrics.LEDGER_TRAINED.set(ledger.trained)
    for reason in Drop:
        metrics.LEDGER_DROPPED.labels(reason.value).set(ledger.dropped[reason.value])


# ---- Trackers of experiments: each line of `metrics.jsonl` once more, in formats that other tools read.
#
#     learner ─offer─► queue per tracker ─► its thread ─► tracker (opened with its first line)
#
# A tracker never delays or ends training: a line is dropped where its queue is full; an error of a tracker is
# counted (`penstock_tracker_failures_total`) and logged, and the tracker gets later lines.

QUEUE_LINES: Final = 256
"""Lines of about a minute; a tracker that lags further loses some."""
REOPEN_S: Final = 30.0
"""Seconds after which a tracker that could not be opened is tried again."""
CLOSE_S: Final = 3.0
"""Seconds that trackers have to write their last lines when the learner ends."""
_FLUSH_S: Final = 5
"""Seconds between two writes of an event file."""
_NO_VALUES: Final = ("time", "env_steps")


class Tracker(Protocol):
    """An open tracker, used by one thread; its methods may raise any error."""

    def write(self, step: int, at: float, values: Mapping[str, float]) -> None:
        """Write values at a count of environment steps and a Unix time."""

    def close(self) -> None:
        """Write the remaining values."""


class Tracking:
    """The trackers of a learner."""

    def __init__(self, openers: Mapping[str, Callable[[], Tracker]]) -> None:
        self._feeds = [_Feed(name, opener) for name, opener in openers.items()]

    def offer(self, row: Mapping[str, Any]) -> None:
        for feed in self._feeds:
            feed.offer(row)

    def close(self) -> None:
        deadline = time.monotonic() + CLOSE_S
        for feed in self._feeds:
            feed.end()
        for feed in self._feeds:
            feed.join(max(0.0, deadline - time.monotonic()))


class _Feed:
    """The queue and the thread of one tracker."""

    def __init__(self, name: str, opener: Callable[[], Tracker]) -> None:
        self._name, self._opener = name, opener
        self._lines: queue.Queue[Mapping[str, Any] | None] = queue.Queue(QUEUE_LINES)
        self._tracker: Tracker | None = None
        self._failed, self._open_at = 0, -math.inf
        metrics.TRACKER_FAILURES.labels(name)
        self._thread = threading.Thread(target=self._run, name=f"track-{name}", daemon=True)
        self._thread.start()

    def offer(self, row: Mapping[str, Any] | None) -> bool:
        try:
            self._lines.put_nowait(row)
        except queue.Full:
            self._count("is too slow")
            return False
        return True

    def end(self) -> None:
        """Send the end to the thread; in a full queue it replaces a line."""
        while not self.offer(None):
            with suppress(queue.Empty):
                self._lines.get_nowait()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("a tracker did not finish in time", extra={"tracker": self._name})

    def _run(self) -> None:
        while (row := self._lines.get()) is not None:
            self._try(self._write, row)
        if self._tracker is not None:
            self._try(self._tracker.close)

    def _write(self, row: Mapping[str, Any]) -> None:
        if self._tracker is None:
            if time.monotonic() < self._open_at:
                self._count("is not open")
                return
            self._open_at = time.monotonic() + REOPEN_S
            self._tracker = self._opener()
        values = {
            name: float(value)
            for name, value in row.items()
            if name not in _NO_VALUES and isinstance(value, int | float) and math.isfinite(value)
        }
        self._tracker.write(int(row["env_steps"]), float(row["time"]), values)

    def _try(self, action: Callable[..., None], *arguments: Any) -> None:
        try:
            action(*arguments)
        except Exception as error:  # noqa: BLE001 - no error of a tracker ends the learner
            self._count(f"{type(error).__name__}: {error}")

    def _count(self, why: str) -> None:
        """Count a failure; log the first, the second, the fourth and so on: four lines come each second."""
        metrics.TRACKER_FAILURES.labels(self._name).inc()
        self._failed += 1
        if self._failed & (self._failed - 1) == 0:
            words = {"tracker": self._name, "failures": self._failed, "cause": why}
            log.warning("a tracker did not take a line; training continues", extra=words)


def make_tracking(settings: Settings, run_dir: Path, *, first_step: int) -> Tracking:
    """Return the trackers of a run. first_step: environment steps at which this learner began."""
    names = settings.metrics.trackers
    return Tracking({name: partial(_OPENERS[name], settings, run_dir, first_step) for name in names})


def check_installed(names: Iterable[str]) -> None:
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigurationError(
                f"metrics.trackers={name!r}: not installed; {how_to_install(name)}, or leave it out"
            )


class _EventFiles:
    """TensorBoard: a new event file in the folder of earlier learners, a curve for each figure.

    Figures of earlier learners after the first step of this one are not shown.
    """

    def __init__(self, _settings: Settings, run_dir: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - takes seconds

        folder = str(run_dir / "tensorboard")
        self._writer = SummaryWriter(folder, purge_step=first_step or None, flush_secs=_FLUSH_S)

    def write(self, step: int, at: float, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=at)

    def close(self) -> None:
        self._writer.close()


class _WandbRun:
    """Weights & Biases: one of its runs for each of ours, also when a learner resumes.

    Online it needs a key (`wandb login`, or WANDB_API_KEY); offline it writes below `wandb/` in the run's
    folder, for `wandb sync` to send later.
    """

    def __init__(self, settings: Settings, run_dir: Path, _first_step: int) -> None:
        import wandb  # noqa: PLC0415 - an extra

        section = settings.metrics
        self._run = wandb.init(
            project=section.wandb_project,
            name=settings.run,
            id=settings.run,
            resume="allow",
            mode=section.wandb_mode,
            dir=str(run_dir),
            config=configuration(settings),
            settings=wandb.Settings(console="off", silent=True),
        )
        # Their own step only rises, and ours goes back when a learner resumes.
        self._run.define_metric("*", step_metric="env_steps")

    def write(self, step: int, at: float, values: Mapping[str, float]) -> None:
        self._run.log({"env_steps": step, **values})

    def close(self) -> None:
        self._run.finish()


_OPENERS: Final[dict[str, Callable[[Settings, Path, int], Tracker]]] = {
    "tensorboard": _EventFiles,
    "wandb": _WandbRun,
}


def configuration(settings: Settings) -> dict[str, Any]:
    """Return the part of the configuration that may leave this machine: no secrets and no addresses."""
    kept_back: dict[str, Any] = {
        "security": True,
        "broker": {"redis"},
        "registry": {"url"},
        "serving": {"listen"},
    }
    return settings.model_dump(mode="json", exclude=kept_back)


# ---- The state of a run for readers, and its results: the final policy and `learner.json`.

_BALANCE_ATTEMPTS: Final = 100


def snapshot(learner: "Learner") -> dict[str, Any]:
    """Return the figures of the run now, by name; may be called from any thread."""
    renewal = learner.lease.renewal
    mean_return, episode_length = learner.episodes.means()
    return {
        "training_seconds": learner.clock.elapsed(),
        "env_steps": learner.ledger.env_steps,
        "updates": learner.algorithm.updates,
        "version": learner.publisher.latest.version,
        "publications": learner.publisher.count,
        "episodes": learner.episodes.count,
        "mean_return": mean_return,
        "episode_length": episode_length,
        "publish_s": learner.publisher.seconds,
        "checkpoint_s": learner.checkpoints.seconds,
        "log_bytes": renewal.log_bytes,
        "outstanding": renewal.outstanding,
        "budget": learner.model.pacing.budget,
        "evaluated": learner.evaluation.figures(),
    }


def describe(learner: "Learner") -> str:
    """Return the learner's part of `Status`, a JSON object; may be called from any thread."""
    books = {"trained": learner.ledger.trained, "dropped": dict(learner.ledger.dropped)}
    return json.dumps(snapshot(learner) | {"ledger": books, "last_update": dict(learner.recorder.last)})


def leave_account(learner: "Learner", ending: str, restored: Result | None, *, finished: bool) -> None:
    """Leave the final policy, the registered version and `learner.json`.

    ending: why learning ended. restored: the evaluation whose weights were published again; None: the newest
    version has the weights of the last update. finished: whether the run has ended, not only this process.
    """
    final = _final(learner, restored)
    write_final(learner.run_dir, final)
    learner.kept.finish(final, learner.evaluation, learner.publisher.latest, ending)
    name_final(learner.run_dir)
    balance = _balance(learner)
    if not balance.balanced:
        log.error("the books do not balance", extra=asdict(balance))
    learner.recorder.finish(
        {"run": learner.model.specification.run, "ending": ending, "finished": finished}
        | _summary(learner, final, balance, restored)
    )
    if learner.recording is not None:
        learner.recording.close()


def _final(learner: "Learner", restored: Result | None) -> FinalPolicy:
    """Return the weights that solved the task, or else the newest ones."""
    solved, newest = learner.evaluation.solved, learner.publisher.latest
    if solved is not None and restored is None:
        blob, version, update = solved.candidate.blob, solved.candidate.version, solved.candidate.update
    else:
        (module,) = learner.algorithm.published_modules().values()
        blob, version, update = weights.encode(module), newest.version, newest.update
    return FinalPolicy(specification=learner.model.specification, blob=blob, version=version, update=update)


def _balance(learner: "Learner") -> Balance:
    """Return the books of one moment: actors may still append while the log is read."""
    learner_log = learner.learner_log
    for _ in range(_BALANCE_ATTEMPTS):
        acked, lost = learner_log.acked(), learner_log.log_lost()
        residue = learner_log.residue(learner.ledger.position)
        if (acked, lost) == (learner_log.acked(), learner_log.log_lost()):
            break
    metrics.LEDGER_RESIDENT.set(residue.entries)
    return learner.ledger.balance(acked=acked, lost=lost + residue.lost, resident=residue.entries)


def _summary(
    learner: "Learner", final: FinalPolicy, balance: Balance, restored: Result | None
) -> dict[str, Any]:
    here, evaluation, seconds = snapshot(learner), learner.evaluation, learner.clock.seconds()
    solved = evaluation.solved
    moment = None if solved is None else (restored or solved).candidate
    return {
        "solved": solved is not None,
        "target_return": learner.model.target,
        "mean_return": here["mean_return"],
        "training_episodes": here["episodes"],
        "evaluation": _evaluation_json(restored or solved or evaluation.last),
        "best_checkpoint": evaluation.checkpoints()[0] or None,
        "restored_from": None if restored is None else restored.candidate.version,
        "env_steps": here["env_steps"],
        "updates": here["updates"],
        "policy_version": final.version,
        "training_seconds": round(seconds, 3),
        "solved_at": moment
        and {"seconds": round(moment.at_s, 3), "env_steps": moment.env_steps, "version": moment.version},
        "env_steps_per_second": round(here["env_steps"] / max(seconds, 1e-9), 1),
        "staleness": learner.recorder.staleness.quantiles(),
        "ledger": {**asdict(balance), "balanced": balance.balanced},
        "recording": _recording_json(learner),
        "findings": learner.algorithm.findings(),
    }


def _recording_json(learner: "Learner") -> dict[str, Any] | None:
    """Return the recording that the run learned from, if it did; the ledger of such a run is empty."""
    recording = learner.model.recording
    if recording is None:
        return None
    return {
        "folder": str(recording.folder),
        "run": recording.specification.run,
        "fragments": len(recording.fragments),
        "steps": sum(place.charge for place in recording.fragments),
        "batches_taken": learner.ledger.recorded,
    }


def _evaluation_json(result: Result | None) -> dict[str, Any] | None:
    if result is None:
        return None
    return {
        **asdict(result.counted),
        "version": result.candidate.version,
        "env_steps": result.candidate.env_steps,
        **scores_json(result),
        "base": base_json(result),
    }
