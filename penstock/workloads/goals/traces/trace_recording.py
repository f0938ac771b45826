"""A log as a recording, decision by decision, without holding it."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.config.configuration_error import ConfigurationError
from penstock.protocol.messages import Publication
from penstock.protocol.spaces import Box, Discrete
from penstock.workloads.goals.off_policy import Decisions, cross_fitted, returns_from
from penstock.workloads.goals.traces.answers import Encoding
from penstock.workloads.goals.traces.judged_policy import learned, learned_policy
from penstock.workloads.goals.traces.log_evaluation import Question
from penstock.workloads.goals.traces.trace_index import TraceIndex
from penstock.workloads.goals.traces.trace_line import RewardWeights, Trace
from penstock.workloads.plugin.recordings import (
    Ended,
    FragmentBuilder,
    HeaderFields,
    Recording,
    RecordingWriter,
    Stepped,
)

# ---- Propensities where the log has none: the policy that acted is imitated, by multinomial logistic
# regression.

_STEPS: Final = 300
_RATE: Final = 0.5
_RIDGE: Final = 1e-3
_LEAST: Final = 1e-3
"""No action that was logged is taken for rarer."""


@dataclass(frozen=True, slots=True)
class PropensityModel:
    """What acted, imitated.

    centre, scale: float32 [d], of what was seen. weights: float64 [d + 1, actions].
    """

    centre: NDArray[np.float32]
    scale: NDArray[np.float32]
    weights: NDArray[np.float64]

    @classmethod
    def fit(cls, seen: NDArray[np.float32], action: NDArray[np.int64], actions: int) -> "PropensityModel":
        """Return the imitation of decisions. seen: float32 [n, d]. action: int64 [n], below `actions`."""
        model = cls(seen.mean(0), seen.std(0) + 1e-6, np.zeros((seen.shape[1] + 1, actions)))
        inputs, wanted = model._inputs(seen), np.eye(actions)[action]
        weights = model.weights
        # The largest eigenvalue of the inputs bounds the curvature, so that no step goes too far.
        rate = _RATE * len(inputs) / max(float(np.linalg.norm(inputs, 2)) ** 2, 1e-12) * 2
        for _ in range(_STEPS):
            gradient = inputs.T @ (_softmax(inputs @ weights) - wanted) / len(inputs) + _RIDGE * weights
            weights -= rate * gradient
        return model

    def of(self, seen: NDArray[np.float32], action: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the estimated probability of each action that was taken, float64 [n]."""
        chances = _softmax(self._inputs(seen) @ self.weights)
        return np.maximum(chances[np.arange(len(action)), action], _LEAST)

    def _inputs(self, seen: NDArray[np.float32]) -> NDArray[np.float64]:
        inputs = np.clip((seen - self.centre) / self.scale, -10, 10).astype(np.float64)
        return np.hstack([inputs, np.ones((len(seen), 1))])


def _softmax(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    powers = np.exp(scores - scores.max(1, keepdims=True))
    shares: NDArray[np.float64] = powers / powers.sum(1, keepdims=True)
    return shares


_ALONE: Final = np.zeros(1, np.intp)
_CHUNK: Final = 4096
_MOST_IMITATED: Final = 4_000_000
"""Numbers of the decisions from which propensities are estimated."""


@dataclass(frozen=True, slots=True)
class _Decision:
    """A trace as a recording has it. seen: float32 [1, width]. log_prob: float32 [1]."""

    trace: Trace
    action: int
    seen: NDArray[np.float32]
    log_prob: NDArray[np.float32]


def record_log(
    index: TraceIndex, encoding: Encoding, weights: RewardWeights, specification: Any, writer: RecordingWriter
) -> int:
    """Write the decisions of all whole episodes, and return how many fragments they are."""
    builder = FragmentBuilder(specification.schema, specification.unroll_length, 1)
    fragments = 0
    for one, after in _with_next(_decisions(index, encoding)):
        if not fragments and not builder.length:
            builder.start({"observation": one.seen})
        step = _stepped(one, after, weights.reward(one.trace.result))
        builder.record({"action": np.array([one.action])}, one.log_prob, step)
        if builder.is_full or after is None:
            fragments += 1
            fields = HeaderFields(
                run=specification.run, session=1, sequence=fragments, weights=Publication(version=1), round=0
            )
            if not writer.fragment(builder.cut(fields)[0]):
                raise ConfigurationError(
                    f"{index.path}: is larger than a recording may be (learner.record_max_bytes); split it, "
                    "where no episode is cut"
                )
    return fragments


def _with_next(decisions: Iterable[_Decision]) -> Iterator[tuple[_Decision, _Decision | None]]:
    before = None
    for one in decisions:
        if before is not None:
            yield before, one
        before = one
    if before is not None:
        yield before, None


def _stepped(one: _Decision, after: _Decision | None, reward: float) -> Stepped:
    ends = after is None or after.trace.step == 0
    return Stepped(
        observation={"observation": one.seen if after is None else after.seen},
        reward=np.array([reward]),
        terminated=np.array([ends]),
        truncated=np.zeros(1, np.bool_),
        valid=None,
        ended=Ended(_ALONE, {"observation": one.seen}) if ends else None,
    )


def _decisions(index: TraceIndex, encoding: Encoding) -> Iterator[_Decision]:
    estimate = None if index.with_propensity == index.decisions else _imitated(index, encoding)
    encoded = _encoded(index.traces(), encoding)
    while chunk := list(islice(encoded, _CHUNK)):
        seen = np.stack([seen for _, seen in chunk])
        action = np.array([encoding.action(trace.action) for trace, _ in chunk], np.int64)
        known = [trace.propensity for trace, _ in chunk]
        if estimate is not None:
            guessed = estimate(seen, action)
            known = [one or guess for one, guess in zip(known, guessed, strict=True)]
        log_prob = np.log(np.array(known, np.float64)).astype(np.float32)
        for row, (trace, _) in enumerate(chunk):
            yield _Decision(trace, int(action[row]), seen[row : row + 1], log_prob[row : row + 1])


def _encoded(traces: Iterable[Trace], encoding: Encoding) -> Iterator[tuple[Trace, NDArray[np.float32]]]:
    before = None
    for trace in traces:
        yield trace, encoding.observation(trace, before if trace.step else None)
        before = trace.result


def _imitated(
    index: TraceIndex, encoding: Encoding
) -> Callable[[NDArray[np.float32], NDArray[np.int64]], NDArray[np.float64]]:
    """Return estimated propensities, from every n-th decision of a log that is large."""
    every = -(-index.decisions * encoding.width // _MOST_IMITATED)
    every_nth = islice(_encoded(index.traces(), encoding), 0, None, every)
    shown = [(seen, encoding.action(trace.action)) for trace, seen in every_nth]
    seen, action = np.stack([seen for seen, _ in shown]), np.array([one for _, one in shown], np.int64)
    return PropensityModel.fit(seen, action, len(encoding.actions)).of


# ---- What a recording says of a policy: experience of actors and of a policy server's clients alike.

_Key = tuple[int, int, int]
"""Session, slot and number of an episode."""
_Arrays = Mapping[str, NDArray[Any]]


@dataclass(slots=True)
class _Episode:
    """steps: rows of it by index. length: of the whole episode, 0 until its end was met."""

    steps: dict[int, int] = field(default_factory=dict)
    length: int = 0
    known: bool = True

    @property
    def is_whole(self) -> bool:
        return self.known and 0 < self.length == len(self.steps)


def ask_recording(folder: Path, run: Path, local: Any, *, discount: float, deterministic: bool) -> Question:
    """Return the decisions of a recording, with what a run's final policy makes of them."""
    recording = Recording(folder)
    specification, policy = learned_policy(run, local)
    recording.check_schema(specification.schema.schema_id)
    if policy.memory.is_recurrent or policy.memory.frames.depth > 1:
        raise ConfigurationError(
            f"--policy {run}: remembers, so that single steps do not say what it would do"
        )
    rows, episodes = collected(recording.load(recording.fragments))
    whole = [episode for episode in episodes.values() if episode.is_whole]
    order = np.array([episode.steps[step] for episode in whole for step in range(episode.length)], np.int64)
    episode = np.repeat(np.arange(len(whole)), [one.length for one in whole]).astype(np.int64)
    taken = {name: array[order] for name, array in rows.items()}
    decisions = _recorded_decisions(
        taken, episode, specification, policy, discount, deterministic=deterministic
    )
    return Question(decisions=decisions, left_out=len(episodes) - len(whole), late=0, late_unmatched=0)


def collected(loaded: Iterable[tuple[Any, _Arrays]]) -> tuple[dict[str, NDArray[Any]], dict[_Key, _Episode]]:
    """Return all steps by tensor name, [n, …], and which of them belong to which episode."""
    parts: defaultdict[str, list[NDArray[Any]]] = defaultdict(list)
    episodes: defaultdict[_Key, _Episode] = defaultdict(_Episode)
    count = 0
    for header, arrays in loaded:
        steps = header.steps
        for column, slot in enumerate(header.slots):
            for name in _step_names(arrays):
                parts[name].append(arrays[name][:steps, column])
            number, index = slot.episode_id, slot.first_step
            for row in range(steps):
                episode = episodes[header.session, slot.slot_id, number]
                episode.steps[index] = count + row
                episode.known &= bool(arrays["valid"][row, column])
                index += 1
                if arrays["terminated"][row, column] or arrays["truncated"][row, column]:
                    episode.length, number, index = index, number + 1, 0
            count += steps
    return {name: np.concatenate(part) for name, part in parts.items()}, dict(episodes)


def _step_names(arrays: _Arrays) -> list[str]:
    heads = ("observation", "action", "mask")
    return [name for name in arrays if name.partition("/")[0] in heads or name in ("reward", "log_prob")]


def _recorded_decisions(
    rows: _Arrays,
    episode: NDArray[np.int64],
    specification: Any,
    policy: Any,
    discount: float,
    *,
    deterministic: bool,
) -> Decisions:
    seen = {name: array for name, array in rows.items() if name.partition("/")[0] in ("observation", "mask")}
    action = {name: array for name, array in rows.items() if name.partition("/")[0] == "action"}
    reward = rows["reward"].astype(np.float64)
    index: NDArray[np.int64] | None = None
    logged = np.minimum(rows["log_prob"].astype(np.float64), 0.0)
    spaces = specification.observation_space, specification.action_space
    if isinstance(spaces[0], Box) and isinstance(spaces[1], Discrete):
        chances = learned(policy, deterministic=deterministic)(rows["observation"])
        index, at = rows["action"].astype(np.int64), np.arange(len(reward))
        flat = rows["observation"].reshape(len(reward), -1).astype(np.float32)
        model = cross_fitted(flat, index, returns_from(episode, reward, discount), episode, chances.shape[1])
        with np.errstate(divide="ignore"):
            target = np.log(chances[at, index])
        predicted, expected = model[at, index], (chances * model).sum(1)
    else:
        if deterministic:
            raise ConfigurationError("--deterministic: only for actions that are one of n")
        target = np.minimum(policy.log_prob(seen, action).astype(np.float64), 0.0)
        predicted = expected = np.zeros(len(reward))
    return Decisions(
        episode=episode,
        reward=reward,
        log_target=target,
        log_logged=logged,
        predicted=predicted,
        expected=expected,
        action=index,
    )
