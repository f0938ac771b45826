"""What a policy would have earned in the place of the one that was logged."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.workloads.goals.off_policy import Decisions, cross_fitted, returns_from
from penstock.workloads.goals.traces.answers import Encoding
from penstock.workloads.goals.traces.judged_policy import JudgedPolicy
from penstock.workloads.goals.traces.late_rewards import Late
from penstock.workloads.goals.traces.trace_file import Log
from penstock.workloads.goals.traces.trace_line import RewardWeights, Trace

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
    policy: JudgedPolicy,
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
    chosen = policy.probabilities(seen)
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


def _rewards(
    traces: Sequence[Trace], weights: RewardWeights, late: Mapping[tuple[str, int], float]
) -> NDArray[np.float64]:
    return np.array(
        [weights.reward(one.result) + late.get((one.episode, one.step), 0.0) for one in traces], np.float64
    )
