"""The loop's state, options and operator commands: `loop.json`, `paused.json` and others below RUN/loop.

A step is written before it begins, with the newest rating that its round trains on. So a killed loop resumes
at that step, and no two rounds train on the same new ratings.
"""

import fcntl
import json
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from penstock.config.configuration_error import ConfigurationError
from penstock.config.run_folder import make_private
from penstock.config.settings import load, parse_assignment
from penstock.registry.canary import Cause, TrialState
from penstock.registry.ratings import KeptRating
from penstock.registry.records import MAX_EVENTS, Action, Status
from penstock.registry.registry import Registry
from penstock.runtime.output_file import replace_file
from penstock.workloads.chat.commands import LoopOptions
from penstock.workloads.chat.ratings import RatingRules, Row, filter_ratings
from penstock.workloads.chat.step_process import KNOWN
from penstock.workloads.language.feedback import place_of, rating_row, rows_of
from penstock.workloads.language.prompt import identity, parse_prompt
from penstock.workloads.language.reward.heads import (
    PREFERRED,
    Head,
    parse_heads,
    parse_weights,
    reward_weights,
)
from penstock.workloads.language.settings import training_settings

FOLDER: Final = "loop"
_STATE: Final = "loop.json"
_PAUSED: Final = "paused.json"
_ABANDON: Final = "abandon.json"
_ROUNDS: Final = "rounds"
MOST_PAST: Final = 1000
"""Past rounds that are stored."""


class Step(StrEnum):
    """A step of a round."""

    WAITING = "waiting"  # for labels
    RATINGS = "ratings"  # filters them
    REWARD = "reward"  # trains the reward model
    TRAINING = "training"  # trains the policy on the reward model's scores
    TRIAL = "trial"  # the new version is the canary


class Outcome(StrEnum):
    """The result of a round."""

    PROMOTED = "promoted"
    WITHDRAWN = "withdrawn"
    UNPROVED = "unproved"  # its evaluation did not find it better, or its trial gave no verdict in time
    UNLEARNED = "unlearned"  # the reward model was no better than chance
    ABANDONED = "abandoned"  # by an operator


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRound:
    """A round that has ended. labels: its new ratings. version: of its canary; None: there was none."""

    number: int
    outcome: Outcome
    why: str
    labels: int
    version: int | None
    auc: float | None
    ended_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopState:
    """The state of the loop.

    number: of the current round, or of the last one. taken: the newest rating that past rounds trained on.
    through: the newest one that this round trains on. labels: new ratings that count, of this round or so
    far. base: the version from which the round trains. version: the one that it made. trial_from: the newest
    rating when the trial began. auc: of the reward model's thumb on held-out ratings. note: what the loop
    waits for, other than ratings. failure: why the step failed; "": it did not. tries: its failures in a row.
    order: the loop's options. judge: round, weights and held-out measures of the newest reward model; empty
    before the first.
    """

    number: int = 0
    step: Step = Step.WAITING
    taken: int = 0
    through: int = 0
    labels: int = 0
    base: int | None = None
    version: int | None = None
    trial_from: int = 0
    auc: float | None = None
    note: str = ""
    failure: str = ""
    tries: int = 0
    order: Mapping[str, Any] = field(default_factory=dict)
    judge: Mapping[str, Any] = field(default_factory=dict)
    past: tuple[PastRound, ...] = ()

    def ended(self, outcome: Outcome, why: str) -> "LoopState":
        done = PastRound(
            number=self.number, outcome=outcome, why=why, labels=self.labels, version=self.version,
            auc=self.auc, ended_s=time.time(),
        )  # fmt: skip
        return replace(
            self,
            step=Step.WAITING,
            taken=self.through,
            labels=0, base=None, version=None, auc=None, note="", failure="", tries=0,
            past=(*self.past, done)[-MOST_PAST:],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pause:
    """A pause of the loop. by: who paused it. until_s: Unix seconds; None: until it is resumed."""

    reason: str
    by: str
    until_s: float | None = None


@dataclass(frozen=True, slots=True)
class Abandonment:
    """A request to abandon a round. by: who made it."""

    number: int
    reason: str
    by: str


def folder_of(run: Path) -> Path:
    return run / FOLDER


def round_folder(folder: Path, number: int) -> Path:
    return folder / _ROUNDS / str(number)


def read_state(folder: Path) -> LoopState:
    file = folder / _STATE
    try:
        found = json.loads(file.read_bytes())
        past = tuple(PastRound(**{**one, "outcome": Outcome(one["outcome"])}) for one in found["past"])
        return LoopState(**{**found, "step": Step(found["step"]), "past": past})
    except FileNotFoundError:
        return LoopState()
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigurationError(
            f"{file}: cannot be read ({error}); move {folder} away to begin the loop anew"
        ) from error


def write_state(folder: Path, state: LoopState) -> None:
    """Write the state, whole and on disk when this returns; raises OSError."""
    replace_file(folder / _STATE, json.dumps(asdict(state), allow_nan=False, indent=1).encode())


def read_pause(folder: Path) -> Pause | None:
    try:
        found = json.loads((folder / _PAUSED).read_bytes())
        until_s = found.get("until_s")
        pause = Pause(str(found["reason"]), str(found["by"]), None if until_s is None else float(until_s))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return Pause("", "")  # a file that cannot be read still means a pause
    return None if pause.until_s is not None and time.time() >= pause.until_s else pause


def pause(folder: Path, reason: str, by: str, until_s: float | None = None) -> None:
    """Pause the loop; raises OSError. until_s: Unix seconds; None: until it is resumed."""
    replace_file(folder / _PAUSED, json.dumps(asdict(Pause(reason, by, until_s))).encode())


def resume(folder: Path) -> None:
    (folder / _PAUSED).unlink(missing_ok=True)


def abandon(folder: Path, reason: str, by: str) -> int:
    """Ask the loop to abandon its round, and return the number; raises ConfigurationError without one."""
    state = read_state(folder)
    if state.step is Step.WAITING:
        raise ConfigurationError(f"round {state.number + 1} has not begun: there is nothing to abandon")
    replace_file(folder / _ABANDON, json.dumps(asdict(Abandonment(state.number, reason, by))).encode())
    return state.number


def read_abandonment(folder: Path) -> Abandonment | None:
    """Return the request to abandon a round; None: there is none, or it cannot be read."""
    try:
        found = json.loads((folder / _ABANDON).read_bytes())
        return Abandonment(int(found["number"]), str(found["reason"]), str(found["by"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def forget_abandonment(folder: Path) -> None:
    (folder / _ABANDON).unlink(missing_ok=True)


# ---- An ensemble of heads for the thumb, each trained on half of the prompts.

OF: Final = "thumb"
MEMBERS: Final = tuple(f"{OF}-{number}" for number in range(1, 5))
_SCALE: Final = "thumbs"


def with_members(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield rows, and after each thumb a copy for each member that trains on it."""
    for row in rows:
        yield row
        if row.get("key") == OF and row.get("score") is not None:
            prompt = _prompt_of(row)
            for number, name in enumerate(MEMBERS, 1):
                if prompt is not None and place_of(prompt, number)[0] % 2 == 0:
                    yield {**row, "key": name}


def member_heads(heads: Sequence[str]) -> list[str]:
    """Return NAME=SCALE of the members; empty where these heads include no thumb."""
    return [f"{name}={_SCALE}" for name in MEMBERS] if f"{OF}={_SCALE}" in heads else []


def member_weights(heads: Sequence[str]) -> list[str]:
    return [f"{one.partition('=')[0]}=0" for one in heads]


def disagreement(shares: Mapping[str, float]) -> float | None:
    """Return the standard deviation of the members' expectations, 0 to 0.5; None without members."""
    found = [shares[name] for name in MEMBERS if name in shares]
    return statistics.pstdev(found) if len(found) == len(MEMBERS) else None


def without_members(shares: Mapping[str, float]) -> dict[str, float]:
    return {name: share for name, share in shares.items() if name not in MEMBERS}


def _prompt_of(row: Row) -> str | None:
    """Return the identity of a row's prompt; None where it has no valid one, which the training reports."""
    try:
        return identity(parse_prompt(row.get("prompt")))
    except ValueError:
        return None


# ---- Options of the loop: ratings per round, rewards, the canary's trial.

_ROUND: Final = {"workload": "rlhf", "environment": {"id": "chat"}, "algorithm": {"name": "token_ppo"}}
"""Settings of every round against which further settings are checked."""
_OWN: Final = (
    "workload",
    "run",
    "environment.id",
    "environment.kwargs.model",
    "environment.kwargs.prompts",
    "environment.kwargs.reward",
    "learner.feed_from",
    "policy.kwargs.begin_with",
    "registry",
    "serving.policy",
)
"""Settings that the loop itself makes for every round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOrder(LoopOptions):
    """Checked options of the loop; raises ConfigurationError that names an invalid option."""

    def __post_init__(self) -> None:
        for name in ("labels", "patience"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"--{name} {getattr(self, name)}: must be at least 1")
        if not 0 < self.share <= 0.8:
            raise ConfigurationError(
                f"--share {self.share:g}: must be above 0 and at most 0.8: the rest gets the active version"
            )
        if not 0 <= self.least_auc <= 1:
            raise ConfigurationError(f"--least-auc {self.least_auc:g}: must lie between 0 and 1")
        heads = _heads_of(self.heads)
        known = [*(one.name for one in heads), PREFERRED]
        weights = parse_weights(self.weights)
        for name in weights:
            if name not in known:
                raise ConfigurationError(f"--weight {name}: there is no such head; use {', '.join(known)}")
        reward_weights(heads, weights)
        option = "--reward"
        try:
            training_settings(self.reward)
            option = "--train"
            load([_ROUND, *map(parse_assignment, self.train)])
        except ConfigurationError as error:
            raise ConfigurationError(f"{option} {error}") from error
        for key in (one.partition("=")[0] for one in self.train):
            if any(f"{key}.".startswith(f"{own}.") or own.startswith(f"{key}.") for own in _OWN):
                raise ConfigurationError(f"--train {key}: the loop sets it in every round; leave it out")

    def reward_words(self, heads: Sequence[str], changed: Mapping[str, float]) -> list[str]:
        """Return options of `penstock rlhf reward train`. changed: weights that operators changed since."""
        members = member_heads(heads)
        weights = (*self.weights_of(heads, changed), *member_weights(members))
        return [
            *(f"--head={one}" for one in (*heads, *members)),
            *(f"--weight={one}" for one in weights),
            *(f"--set={one}" for one in self.reward),
        ]

    def weights_of(self, heads: Sequence[str], changed: Mapping[str, float]) -> list[str]:
        """Return the weights, NAME=NUMBER, of a model with these heads, NAME=SCALE."""
        there = {one.partition("=")[0] for one in heads} | {PREFERRED}
        said = (*self.weights, *(f"{name}={one!r}" for name, one in changed.items()))
        return [one for one in said if one.partition("=")[0] in there]

    def shown(self) -> dict[str, Any]:
        return dict(json.loads(json.dumps(asdict(self))))


# ---- The weight of each criterion in the loop's reward, which operators change while the loop runs.

_WEIGHTS: Final = "weights.json"
MOST_CHANGES: Final = 100
"""Changes that are stored; the weights that older ones set stay in force."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightChange:
    """A change of weights. by: who made it. at_s: Unix seconds."""

    weights: Mapping[str, float]
    reason: str
    by: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadWeights:
    """Changed weights of heads. standing: the current weight of each changed head."""

    standing: Mapping[str, float] = field(default_factory=dict)
    changes: tuple[WeightChange, ...] = ()


def read_head_weights(folder: Path) -> HeadWeights:
    """Return the changed weights of a loop; raises ConfigurationError for an unreadable file."""
    file = folder / _WEIGHTS
    try:
        found = json.loads(file.read_bytes())
        standing = {str(name): float(one) for name, one in found["standing"].items()}
        return HeadWeights(standing=standing, changes=tuple(WeightChange(**one) for one in found["changes"]))
    except FileNotFoundError:
        return HeadWeights()
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigurationError(
            f"{file}: cannot be read ({error}); move it away, and the weights are those of --weight again"
        ) from error


def weigh(folder: Path, weights: Mapping[str, float], reason: str, by: str) -> dict[str, float]:
    """Change weights of heads from the next reward model on; returns the weights of all heads."""
    order = read_state(folder).order
    make_private(folder)
    with (folder / "weights.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = read_head_weights(folder)
        heads, known = _known(order, before.standing)
        every = reward_weights(heads, {**known, **weights})
        change = WeightChange(weights=dict(weights), reason=reason, by=by, at_s=time.time())
        after = HeadWeights(
            standing={**before.standing, **weights}, changes=(*before.changes, change)[-MOST_CHANGES:]
        )
        replace_file(folder / _WEIGHTS, json.dumps(asdict(after), allow_nan=False, indent=1).encode())
    return every


def standing_weights(order: Mapping[str, Any], weighed: HeadWeights) -> dict[str, float]:
    """Return the current weight of every head; all 0 where only heads of an earlier start have weights."""
    heads, known = _known(order, weighed.standing)
    return {**{one.name: 1.0 for one in heads}, PREFERRED: 0.0, **known}


def shown_weights(weights: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {one:g}" for name, one in weights.items())


def _heads_of(said: Sequence[str] | None) -> tuple[Head, ...]:
    """Return the named heads, else those that the page rates."""
    return parse_heads(said or [f"{name}={scale}" for name, scale in KNOWN.items()])


def _known(
    order: Mapping[str, Any], standing: Mapping[str, float]
) -> tuple[tuple[Head, ...], dict[str, float]]:
    """Return the heads of a loop and their given weights: of its options, replaced by changed ones."""
    heads = _heads_of(order.get("heads"))
    there = {*(one.name for one in heads), PREFERRED}
    said = {**parse_weights(order.get("weights", ())), **standing}
    # An earlier change may name heads that the loop no longer has.
    return heads, {name: one for name, one in said.items() if name in there}


# ---- The ratings of a run's answers that count, and the number of new ones.

_PAGE: Final = 1000


class NewRatings:
    """Counts the ratings of a policy after a number, and reads each of them once."""

    def __init__(self, policy: str, after: int) -> None:
        self._policy = policy
        self.count, self.newest = 0, after

    def look(self, registry: Registry) -> int:
        """Read further ratings, and return how many there are in all."""
        while page := registry.ratings(self._policy, self.newest, _PAGE):
            self.count, self.newest = self.count + len(page), page[-1].number
        return self.count


def believed(registry: Registry, policy: str, through: int) -> list[Row]:
    """Return the rows that count among the ratings up to a number, each with its `number`."""
    rows = [rating_row(one) for one in _through(registry, policy, through)]
    return filter_ratings(rows, RatingRules()).kept


def new_among(rows: Iterable[Row], after: int) -> int:
    return sum(row["number"] > after for row in rows)


def replayed_prompts(rows: Iterable[Row], prompts: str) -> list[dict[str, Any]]:
    """Return each rated prompt once, then the run's own prompts, so that training still covers them."""
    found: dict[str, Any] = {}
    for row in rows:
        found.setdefault(_prompt_of(row) or repr(row["prompt"]), row["prompt"])
    for _, row in rows_of(prompts) if prompts else ():
        if not isinstance(row, ValueError) and row.get("prompt") is not None:
            found.setdefault(_prompt_of(row) or repr(row["prompt"]), row["prompt"])
    return [{"prompt": prompt} for prompt in found.values()]


def _through(registry: Registry, policy: str, through: int) -> Iterable[KeptRating]:
    after = 0
    while page := registry.ratings(policy, after, _PAGE):
        after = page[-1].number
        yield from (one for one in page if one.number <= through)


# ---- The operators' view of the loop and of its canary's trial.

PAST: Final = 10
"""Past rounds that are shown."""


def look_at_loop(run: Path, registry: Registry, policy: str) -> dict[str, Any] | None:
    """Return the state of a run's loop as JSON values; None where it was never started."""
    folder = folder_of(run)
    state, pause = read_state(folder), read_pause(folder)
    if not state.order:
        return None
    abandoned = read_abandonment(folder)
    new = NewRatings(policy, state.taken if state.step is Step.WAITING else state.through)
    return {
        "round": state.number,
        "step": state.step.value,
        "paused": None if pause is None else asdict(pause),
        "failure": state.failure,
        "tries": state.tries,
        "abandoned": None if abandoned is None or abandoned.number != state.number else asdict(abandoned),
        "note": state.note,
        "newRatings": new.look(registry),
        "labels": state.labels,
        "labelsWanted": state.order["labels"],
        "weights": standing_weights(state.order, read_head_weights(folder)),
        "judge": _judge(state.judge) if state.judge else None,
        "base": state.base,
        "version": state.version,
        "auc": state.auc,
        "past": [asdict(one) for one in reversed(state.past[-PAST:])],
    }


def _judge(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return measures of the newest reward model for each criterion on held-out ratings."""
    measures = found["measures"]
    return {
        "round": found["round"],
        "heads": [
            {
                "head": name,
                "weight": found["weights"][name],
                "ratings": one["ratings"],
                "auc": one["auc"],
                "squaredError": one["squared_error"],
                "calibrationError": one["calibration_error"],
            }
            for name, one in measures["heads"].items()
            if name not in MEMBERS
        ],
        "pairs": measures["pairs"],
        "pairAccuracy": measures["pair_accuracy"],
        "pairsWeight": found["weights"][PREFERRED],
    }


def look_at_canaries(registry: Registry, policy: str, false_alarm: float | None) -> dict[str, Any]:
    """Return the state of the canary's trial, and the number of canaries so far.

    false_alarm: for each canary, the chance that one that equals the active version ever gets a verdict;
    None: unknown. In the result, `worse` and `better` are the evidence for a verdict, from 0 to 1, and
    `ratesDiffer` tells that people rate the two arms at different rates, which rules out the verdict that the
    canary is better.
    """
    trial, state = registry.trial(policy)
    tried = {
        one.version
        for one in registry.events(policy, MAX_EVENTS)
        if one.action is Action.PROMOTED and one.detail.get("to") == Status.CANARY.value
    }
    return {
        "tried": len(tried),
        "falseAlarm": false_alarm,
        "trial": None if trial is None else _shown(trial.canary, state, false_alarm),
    }


def _shown(version: int, state: TrialState | None, false_alarm: float | None) -> dict[str, Any]:
    found = state or TrialState()
    first = found.levels[0]
    return {
        "version": version,
        "verdict": found.verdict.text,
        "canaryPeople": first.canary,
        "activePeople": first.active,
        "worse": _progress(found, Cause.LOWER_RETURN, false_alarm),
        "better": _progress(found, Cause.HIGHER_RETURN, false_alarm),
        "ratesDiffer": found.rates_differ,
    }


def _progress(state: TrialState, cause: Cause, false_alarm: float | None) -> float | None:
    return None if false_alarm is None else min(1.0, state.progress(cause, false_alarm))
