"""What a policy would have earned in the place of the one that was logged, late rewards included."""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.config.configuration_error import ConfigurationError
from penstock.registry.records import RegistryError
from penstock.registry.registry import Registry
from penstock.workloads.goals.off_policy import Decisions, cross_fitted, returns_from
from penstock.workloads.goals.traces.answers import Encoding
from penstock.workloads.goals.traces.judged_policy import Chances
from penstock.workloads.goals.traces.trace_index import Log
from penstock.workloads.goals.traces.trace_line import RewardWeights, Trace

Late = Mapping[tuple[str, int], float]
"""Sum of the late rewards, by episode and step."""
_NONE: Final[Late] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A log as a question about a policy.

    left_out: whole episodes without the propensity of some decision. late: late rewards that met a decision,
    and late_unmatched: those that met none.
    """

    decisions: Decisions
    left_out: int
    late: int
    late_unmatched: int


def ask(
    log: Log,
    encoding: Encoding,
    policy: Chances,
    *,
    weights: RewardWeights,
    discount: float,
    late: Late = _NONE,
) -> Question:
    """Return whole episodes with known propensities: the rest of one would be weighted wrongly."""
    used = [episode for episode in log.episodes if all(one.propensity is not None for one in episode)]
    traces = [trace for episode in used for trace in episode]
    seen = encoding.episodes(used)
    action = np.array([encoding.action(trace.action) for trace in traces], np.int64)
    episode = np.repeat(np.arange(len(used)), [len(one) for one in used]).astype(np.int64)
    reward = _rewards(traces, weights, late)
    chosen = policy(seen)
    model = cross_fitted(
        seen, action, returns_from(episode, reward, discount), episode, len(encoding.actions)
    )
    rows = np.arange(len(traces))
    with np.errstate(divide="ignore"):
        log_target = np.log(chosen[rows, action])
    decisions = Decisions(
        episode=episode,
        reward=reward,
        log_target=log_target,
        log_logged=np.log([one.propensity or 1.0 for one in traces]),
        predicted=model[rows, action],
        expected=(chosen * model).sum(1),
        action=action,
    )
    met = sum((trace.episode, trace.step) in late for trace in log.traces)
    return Question(
        decisions=decisions, left_out=len(log.episodes) - len(used), late=met, late_unmatched=len(late) - met
    )


def _rewards(traces: Sequence[Trace], weights: RewardWeights, late: Late) -> NDArray[np.float64]:
    return np.array(
        [weights.reward(one.result) + late.get((one.episode, one.step), 0.0) for one in traces], np.float64
    )


# ---- Rewards that came after their decision: {"episode": "monday", "step": 3, "amount": 0.5}

_PAGE: Final = 1000


class _LateReward(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    episode: Annotated[str, Field(min_length=1, max_length=128)]
    step: Annotated[int, Field(ge=0, strict=True)]
    amount: Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False, strict=True)]
    number: int | None = None
    createdAt: str | None = None  # noqa: N815 - as a gateway exports it


def read_late(place: str, policy: str) -> Late:
    """Return the late rewards of a file of JSON lines, or of a policy in the registry at a URL."""
    is_registry = place.startswith(("sqlite:", "postgresql:"))
    total: defaultdict[tuple[str, int], float] = defaultdict(float)
    for episode, step, amount in _of_registry(place, policy) if is_registry else _of_file(Path(place)):
        total[episode, step] += amount
    return dict(total)


def _of_file(path: Path) -> Iterator[tuple[str, int, float]]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise ConfigurationError(f"--late {path}: cannot be read: {error.strerror}") from error
    with file:
        for number, line in enumerate(file, 1):
            try:
                one = _LateReward.model_validate(json.loads(line))
            except ValidationError as error:
                first = error.errors()[0]
                field = ".".join(str(part) for part in first["loc"])
                raise ConfigurationError(f"{path}: line {number}: {field}: {first['msg']}") from error
            except ValueError as error:
                raise ConfigurationError(f"{path}: line {number}: no JSON: {error}") from error
            yield one.episode, one.step, one.amount


def _of_registry(url: str, policy: str) -> Iterator[tuple[str, int, float]]:
    try:
        with Registry.read(url) as registry:
            after = 0
            while page := registry.feedback(policy, after, _PAGE):
                yield from ((one.episode, one.step, one.amount) for one in page)
                after = page[-1].number
    except (RegistryError, ValueError) as error:
        raise ConfigurationError(f"--late: {error}") from error
