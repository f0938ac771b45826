"""A log as a recording, decision by decision, without holding it."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.config.configuration_error import ConfigurationError
from penstock.protocol.messages import Publication
from penstock.workloads.goals.traces.encoding import Encoding
from penstock.workloads.goals.traces.propensity_model import PropensityModel
from penstock.workloads.goals.traces.trace_index import TraceIndex
from penstock.workloads.goals.traces.trace_line import Trace
from penstock.workloads.goals.traces.trace_reward import RewardWeights
from penstock.workloads.plugin.recordings import (
    Ended,
    FragmentBuilder,
    HeaderFields,
    RecordingWriter,
    Stepped,
)

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
    """Write the decisions of all whole episodes, and return how many fragments they are.

    Raises ConfigurationError where they are more than the recording may hold.
    """
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
