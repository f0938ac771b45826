"""Evaluations of a run: their results, the comparison with a base, and when a run stops early."""

import json
import logging
import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

from penstock.broker.log.learner_log import LearnerLog
from penstock.broker.log.replies import ReportEntry
from penstock.config.settings import ConfigurationError, EvaluationSection
from penstock.config.workload import Workload
from penstock.learner.lease import LeaseKeeper
from penstock.protocol.messages import BASE, Episode, Report
from penstock.runtime import metrics

log = logging.getLogger(__name__)

# ---- An evaluated version compared with the base, the initial policy, on the same episodes.

LEAST_STARTS: Final = 6
"""Fewer starts are not significant at 95% even where all of them agree: 2 · 0.5⁵ = 0.06."""
BETTER: Final = "better"
WORSE: Final = "worse"
CHANCE: Final = "chance"

Key = tuple[int, int]
"""The start of an episode, and its number among those with that start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseComparison:
    """The episodes of a version compared with as many of the base.

    mean, std, length: of the base: undiscounted returns, their deviation over episodes, steps.
    version_length: mean steps of the version's episodes. difference: mean return of the version less the
    base's. standard_error: of it; low, high: its 95% interval; None with fewer than LEAST_STARTS starts.
    """

    mean: float
    std: float
    episodes: int
    starts: int
    length: float
    version_length: float
    difference: float
    standard_error: float | None
    low: float | None
    high: float | None

    @property
    def verdict(self) -> str:
        if self.low is not None and self.low > 0.0:
            return BETTER
        return WORSE if self.high is not None and self.high < 0.0 else CHANCE

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "BaseComparison":
        return cls(**{name: found for name, found in value.items() if name != "verdict"})


def check_base(section: EvaluationSection, workload: Workload) -> None:
    """Raise ConfigurationError where an evaluation actor cannot play the initial policy."""
    if section.base and workload.acting:
        raise ConfigurationError(
            f"evaluation.base=true: policies of workload {workload.name!r} act once they have weights; leave "
            "it out"
        )


def compare(version: Mapping[Key, Episode], base: Mapping[Key, Episode]) -> BaseComparison | None:
    """Compare the episodes of a version with the base's; None where no two have the same key."""
    pairs = [(version[key], base[key]) for key in sorted(version.keys() & base.keys())]
    if not pairs:
        return None
    returns = [other.episode_return for _, other in pairs]
    differences = [(own.slot_id, own.episode_return - other.episode_return) for own, other in pairs]
    mean = statistics.fmean(difference for _, difference in differences)
    starts, error = _standard_error(differences, mean)
    margin = None if error is None else _quantile(starts - 1) * error
    return BaseComparison(
        mean=statistics.fmean(returns),
        std=statistics.pstdev(returns),
        episodes=len(pairs),
        starts=starts,
        length=statistics.fmean(other.length for _, other in pairs),
        version_length=statistics.fmean(own.length for own, _ in pairs),
        difference=mean,
        standard_error=error,
        low=None if margin is None else mean - margin,
        high=None if margin is None else mean + margin,
    )


def _standard_error(differences: list[tuple[int, float]], mean: float) -> tuple[int, float | None]:
    sums: dict[int, float] = {}
    for start, difference in differences:
        sums[start] = sums.get(start, 0.0) + difference - mean
    count = len(sums)
    if count < LEAST_STARTS:
        return count, None
    variance = count / (count - 1) * math.fsum(one * one for one in sums.values())
    return count, math.sqrt(variance) / len(differences)


def _quantile(degrees: int) -> float:
    """Return t(0.975) of five degrees of freedom or more, to 0.2% (Abramowitz and Stegun 26.7.5)."""
    z = statistics.NormalDist().inv_cdf(0.975)
    return (
        z
        + (z**3 + z) / (4 * degrees)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
    )


# ---- Early stopping: how many evaluations in a row may bring no improvement before a run ends.


class Patience:
    """Counts the evaluations in a row without improvement.

    An evaluation is an improvement when its mean exceeds the best one's by more than
    `evaluation.min_improvement`; the first is one. `evaluation.patience` of the others in a row exhaust it.
    """

    def __init__(self, section: EvaluationSection) -> None:
        self._patience = section.patience
        self._least = section.min_improvement
        self.best: float | None = None
        self.without = 0
        """Evaluations since the last improvement."""

    def judge(self, mean: float) -> None:
        """Count the next evaluation; one without a finite mean is no improvement."""
        improved = math.isfinite(mean) and (self.best is None or mean > self.best + self._least)
        self.without = 0 if improved else self.without + 1
        if improved:
            self.best = mean

    @property
    def exhausted(self) -> bool:
        return self._patience is not None and self.without >= self._patience

    def state(self) -> dict[str, Any]:
        return {"best": self.best, "without": self.without}

    def restore(self, state: dict[str, Any]) -> None:
        self.best, self.without = state["best"], int(state["without"])


def check_patience(section: EvaluationSection) -> None:
    if section.patience is not None and not (section.interval_steps and section.episodes):
        raise ConfigurationError(
            f"evaluation.patience={section.patience}: counts evaluations, and none are made while training; "
            "say how often as evaluation.interval_steps, and evaluation.episodes above 0"
        )


RECENT_EPISODES = 20
"""An evaluation is requested when the mean of this many training episodes reaches the target."""
MISSED_EPISODES = 500
"""An evaluation is requested when no episode ends within the steps of this many mean episodes.

That happens where actors do not live as long as a good episode. It is more than most runs have slots, and
slots that begin together end together.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Published weights that evaluation actors play.

    at_s: seconds of training when they were made. checkpoint: made at that update; "" without one.
    """

    version: int
    update: int
    env_steps: int
    at_s: float
    blob: bytes
    checkpoint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Undiscounted returns over fixed seeds; std: over episodes."""

    mean: float
    std: float
    episodes: int

    @classmethod
    def of(cls, returns: Sequence[float]) -> Self:
        return cls(mean=statistics.fmean(returns), std=statistics.pstdev(returns), episodes=len(returns))


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of one evaluation of a version.

    scores: by the `way` that it was played. deterministic: the way that counts. base: comparison with the
    initial policy; None where that was not played.
    """

    candidate: Candidate
    scores: Mapping[str, Score]
    deterministic: bool
    base: BaseComparison | None = None

    @property
    def counted(self) -> Score:
        """Return the score that decides on the target, on the best version and on patience."""
        return self.scores[way(deterministic=self.deterministic)]

    @property
    def mean(self) -> float:
        return self.counted.mean


def way(*, deterministic: bool) -> str:
    """Return the name of a way to play in metrics, `metrics.jsonl` and the summary."""
    return "deterministic" if deterministic else "sampled"


class Evaluation:
    """Decides which weights are evaluated, and collects the results; safe to use from several threads."""

    def __init__(self, section: EvaluationSection, target: float | None, *, stop_at_target: bool) -> None:
        self._section = section
        self._target = target
        self._stop_at_target = stop_at_target
        self._patience = Patience(section)
        self._ways = (True, False) if section.both else (section.deterministic,)
        self._lock = threading.Lock()
        self._is_requested = False
        self._pending: Candidate | None = None
        self._played: dict[bool, dict[Key, Episode]] = {}
        self._base: dict[Key, Episode] = {}
        self._last_steps = 0
        self._last_update = -1
        self._ended = self._ended_steps = 0
        self._settled = (0, -1)
        """Steps and update of the last one that has a result."""
        self.last: Result | None = None
        self.best: Result | None = None

    def wanted(
        self,
        recent: Sequence[float],
        *,
        update: int,
        env_steps: int,
        ended: int = 0,
        length: float | None = None,
    ) -> bool:
        """Return whether the weights of `update` should be evaluated. recent: returns, newest last.

        ended: training episodes so far. length: their mean length lately, in steps; None before the first.

        It is True at most once until there is a result, and never when patience is exhausted. Publish the
        weights and call `note_published` next.
        """
        with self._lock:
            is_busy = self._is_requested or self._pending is not None or update <= self._last_update
            if is_busy or self._patience.exhausted or not self._section.episodes:
                return False
            is_silent, interval = self._is_silent(env_steps, ended, length), self._section.interval_steps
            is_due = interval is not None and env_steps - self._last_steps >= interval
            self._is_requested = self._promising(recent) or is_due or is_silent
            return self._is_requested

    def request(self, update: int) -> bool:
        """Request an evaluation of `update`; returns False if one is pending, made or switched off."""
        with self._lock:
            if not self._section.episodes or self._pending is not None or update <= self._last_update:
                return False
            self._is_requested = True
            return True

    def note_published(self, candidate: Candidate) -> Candidate | None:
        """Note that evaluation actors get these weights; returns the candidate that they replace."""
        with self._lock:
            replaced = self._pending
            self._is_requested, self._pending = False, candidate
            self._played = {one: {} for one in self._ways}
            self._last_update, self._last_steps = candidate.update, candidate.env_steps
            return replaced

    def lacks_checkpoint(self, update: int) -> bool:
        """Return whether the weights of `update` are being evaluated or the best, and have no checkpoint."""
        with self._lock:
            best = None if self.best is None else self.best.candidate
            candidates = [one for one in (self._pending, best) if one is not None]
            return any(one.update == update and not one.checkpoint for one in candidates)

    def kept_as(self, checkpoint: str, update: int) -> None:
        """Note the checkpoint that holds `update`, which is being evaluated or may be the best already."""
        with self._lock:
            if self._pending is not None and self._pending.update == update:
                self._pending = replace(self._pending, checkpoint=checkpoint)
            best = self.best
            if best is not None and best.candidate.update == update and not best.candidate.checkpoint:
                self.best = replace(best, candidate=replace(best.candidate, checkpoint=checkpoint))

    def checkpoints(self) -> tuple[str, str]:
        """Return the checkpoints of the best result and of what is being evaluated; "" for none."""
        with self._lock:
            best = "" if self.best is None else self.best.candidate.checkpoint
            return best, "" if self._pending is None else self._pending.checkpoint

    def abandon(self) -> Candidate | None:
        with self._lock:
            abandoned = self._pending
            self._is_requested, self._pending = False, None
            return abandoned

    def collect(self, report: Report) -> Result | None:
        with self._lock:
            if self._section.base and report.deterministic == self._section.deterministic:
                self._base |= _of_version(report, BASE)
            candidate = self._pending
            if candidate is None or report.deterministic not in self._ways:
                return None
            self._played[report.deterministic] |= _of_version(report, candidate.version)
            if any(len(found) < self._section.episodes for found in self._played.values()):
                return None
            return self._complete(candidate)

    @property
    def pending(self) -> bool:
        with self._lock:
            return self._is_requested or self._pending is not None

    @property
    def solved(self) -> Result | None:
        """Return the result that reached the target: the last one if it did, else the best one.

        A learner that resumes has the weights of the best result only.
        """
        with self._lock:
            found = [r for r in (self.last, self.best) if r is not None and r.candidate.blob]
            reached = [r for r in found if self._reaches(r.mean)]
            return reached[0] if reached else None

    @property
    def without_improvement(self) -> int:
        """Evaluations since the last that was better than all before by `evaluation.min_improvement`."""
        with self._lock:
            return self._patience.without

    @property
    def is_out_of_patience(self) -> bool:
        with self._lock:
            return self._patience.exhausted

    def figures(self) -> dict[str, float]:
        """Return the figures of the last result and the best, for `metrics.jsonl`; empty before the first."""
        with self._lock:
            if self.last is None or self.best is None:
                return {}
            means = {f"evaluation_{name}": score.mean for name, score in self.last.scores.items()}
            return means | {
                "evaluation_version": self.last.candidate.version,
                "evaluation_best": self.best.mean,
                "evaluations_without_improvement": self._patience.without,
            }

    def state(self) -> tuple[dict[str, Any], bytes]:
        """Return a JSON object for a checkpoint and the best weights, b"" before the first result.

        A pending evaluation is left out: a resumed learner requests another. The base's episodes are part of
        it, because they are not played again.
        """
        with self._lock:
            steps, update = self._settled
            state = {
                "last_steps": steps,
                "last_update": update,
                "patience": self._patience.state(),
                "base": [asdict(episode) for episode in self._base.values()],
            }
            if self.last is not None:
                state["last"] = _to_json(self.last)
            if self.best is None:
                return state, b""
            return state | {"best": _to_json(self.best)}, self.best.candidate.blob

    def restore(self, state: dict[str, Any], best: bytes, there: Container[str] | None = None) -> None:
        """Restore what `state` returned.

        there: checkpoints on disk; None: all. A run that went back may have removed that of the best result.
        """
        with self._lock:
            self._settled = self._last_steps, self._last_update = state["last_steps"], state["last_update"]
            self._patience.restore(state["patience"])
            # Without a base the run may have other episodes, which these do not belong to.
            episodes = state["base"] if self._section.base else ()
            self._base = _by_key(Episode(**one) for one in episodes)
            if "best" in state:
                found = _from_json(state["best"], best)
                if there is not None and found.candidate.checkpoint not in there:
                    found = replace(found, candidate=replace(found.candidate, checkpoint=""))
                self.best = found
            if "last" in state:
                last = _from_json(state["last"], b"")
                is_best = self.best is not None and self.best.candidate.version == last.candidate.version
                self.last = self.best if is_best else last

    def _complete(self, candidate: Candidate) -> Result:
        scores = {
            way(deterministic=one): Score.of([episode.episode_return for episode in played.values()])
            for one, played in self._played.items()
        }
        counts = self._section.deterministic
        base = compare(self._played[counts], self._base)
        result = Result(candidate=candidate, scores=scores, deterministic=counts, base=base)
        self._pending = None
        self._settled = candidate.env_steps, candidate.update
        self._patience.judge(result.mean)
        self.last = result
        if self.best is None or result.mean >= self.best.mean:
            self.best = result
        return result

    def _reaches(self, mean: float) -> bool:
        return self._target is not None and mean >= self._target

    def _promising(self, recent: Sequence[float]) -> bool:
        newest = recent[-RECENT_EPISODES:]
        enough = self._stop_at_target and len(newest) == RECENT_EPISODES
        return enough and self._reaches(statistics.fmean(newest))

    def _is_silent(self, env_steps: int, ended: int, length: float | None) -> bool:
        """Return whether MISSED_EPISODES should have ended since one did, or since the last evaluation."""
        if ended != self._ended:
            self._ended, self._ended_steps = ended, env_steps
        if self._target is None or not self._stop_at_target or length is None:
            return False
        return env_steps - max(self._ended_steps, self._last_steps) > MISSED_EPISODES * length


def _of_version(report: Report, version: int) -> dict[Key, Episode]:
    return _by_key(episode for episode in report.episodes if episode.version == version)


def _by_key(episodes: Iterable[Episode]) -> dict[Key, Episode]:
    return {(episode.slot_id, episode.episode_id): episode for episode in episodes}


def _to_json(result: Result) -> dict[str, Any]:
    value = asdict(result) | {"base": base_json(result)}
    del value["candidate"]["blob"]
    return value


def _from_json(value: dict[str, Any], blob: bytes) -> Result:
    base = value["base"]
    return Result(
        candidate=Candidate(**value["candidate"], blob=blob),
        scores={name: Score(**score) for name, score in value["scores"].items()},
        deterministic=value["deterministic"],
        base=None if base is None else BaseComparison.from_json(base),
    )


def base_json(result: Result) -> dict[str, Any] | None:
    return None if result.base is None else result.base.to_json()


def scores_json(result: Result) -> dict[str, dict[str, Any] | None]:
    found = {name: asdict(score) for name, score in result.scores.items()}
    return {name: found.get(name) for name in (way(deterministic=True), way(deterministic=False))}


# ---- `episodes.jsonl` of a run's folder: a line for each training episode, as actors report them.

EPISODES: Final = "episodes.jsonl"
BEFORE: Final = "episodes.1.jsonl"
MOST_BYTES: Final = 64 * 2**20


class EpisodeLog:
    """Appends to the file of one run. Episodes that the disk does not take are lost, with one warning."""

    def __init__(self, run_dir: Path, most_bytes: int = MOST_BYTES) -> None:
        self._file, self._before = run_dir / EPISODES, run_dir / BEFORE
        self._most, self._fails = most_bytes, False

    def add(self, first: int, episodes: Iterable[Episode]) -> None:
        """Append episodes. first: number of the first of them in the run, from 1."""
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


# ---- Episodes as the actors report them: recent training episodes, and evaluations.

WINDOW: Final = 100
_READ: Final = 512
_WAIT_S: Final = 0.1


@dataclass(eq=False)
class Episodes:
    """The returns and lengths of the last training episodes. `run` reads reports in a thread."""

    learner_log: LearnerLog
    lease: LeaseKeeper
    evaluation: Evaluation
    stop: threading.Event
    on_result: Callable[[Result], None]
    episode_log: EpisodeLog | None = None

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._returns: deque[float] = deque(maxlen=WINDOW)
        self._lengths: deque[int] = deque(maxlen=WINDOW)
        self._after = 0
        self.count = 0

    def restore(self, state: dict[str, Any]) -> None:
        with self._lock:
            self._returns.extend(state["returns"])
            self._lengths.extend(state["lengths"])
            self._after, self.count = int(state["after"]), int(state["count"])

    def state(self) -> dict[str, Any]:
        with self._lock:
            return {
                "returns": list(self._returns),
                "lengths": list(self._lengths),
                "after": self._after,
                "count": self.count,
            }

    def recent(self) -> list[float]:
        with self._lock:
            return list(self._returns)

    def means(self) -> tuple[float | None, float | None]:
        """Return mean return and mean length of the last training episodes; None before the first."""
        with self._lock:
            if not self._returns:
                return None, None
            return statistics.fmean(self._returns), statistics.fmean(self._lengths)

    def run(self) -> None:
        while not self.stop.is_set():
            entries = self.learner_log.read_reports(self._after, _READ)
            for entry in entries:
                self._take(entry)
            if len(entries) < _READ:
                self.stop.wait(_WAIT_S)

    def _take(self, entry: ReportEntry) -> None:
        report = entry.report
        if report.evaluation:
            result = self.evaluation.collect(report)
            if result is not None:
                self._finish(result)
        elif self.episode_log is not None and report.episodes:
            self.episode_log.add(self.count + 1, report.episodes)
        with self._lock:
            self._after = entry.number
            if not report.evaluation:
                self.count += len(report.episodes)
                self._returns.extend(episode.episode_return for episode in report.episodes)
                self._lengths.extend(episode.length for episode in report.episodes)
        mean, _ = self.means()
        if mean is not None:
            metrics.MEAN_RETURN.set(mean)

    def _finish(self, result: Result) -> None:
        for name, score in result.scores.items():
            metrics.EVALUATION_RETURN.labels(name).set(score.mean)
        if self.evaluation.best is not None:
            metrics.EVALUATION_BEST_RETURN.set(self.evaluation.best.mean)
        metrics.EVALUATIONS_WITHOUT_IMPROVEMENT.set(self.evaluation.without_improvement)
        words = {
            "version": result.candidate.version,
            **{name: score.mean for name, score in result.scores.items()},
            "std": result.counted.std,
            "episodes": result.counted.episodes,
            "env_steps": result.candidate.env_steps,
        }
        log.info("evaluated", extra=words)
        self.on_result(result)
        # A restarted evaluation actor would play the version again.
        self.lease.patiently(lambda: self.learner_log.end_evaluation(result.candidate.version))
