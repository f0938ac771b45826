"""A conversation as a column: all its tokens in order, of which the assistant's were sampled.

    row t            prompt                turn 1      a message        turn 2              behind
    observation[t]   …                     …           …                …                   pad
    action[t]        the token behind
    valid[t]         false                 true        false            true                false
    reward[t]        0                     0 … r_1     0                0 … r_2             0

The turn's tokens are valid in the row before each, where they are the action. One end, at the last sampled
token: `terminated` where the conversation was over, `truncated` where the column was cut. A single response
is a column of one turn. A column without a turn is valid nowhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.protocol.header import WeightSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTurn:
    """Tokens that were sampled, and what they earned.

    start: index of the first among the column's ids, from 1. log_prob: of each, when it was sampled.
    version, update: of the weights that sampled it.
    """

    start: int
    log_prob: tuple[float, ...]
    version: int
    update: int
    reward: float = 0.0

    @property
    def end(self) -> int:
        """Index behind the last."""
        return self.start + len(self.log_prob)


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """ids: all tokens. turns: in order, apart or beside one another. terminated: it was over, not cut."""

    ids: tuple[int, ...]
    turns: tuple[SampledTurn, ...] = field(default=())
    terminated: bool = True

    @property
    def rows(self) -> int:
        """T that it needs."""
        return max(1, len(self.ids) - 1)


def column_tensors(columns: Sequence[Column], pad_id: int) -> dict[str, Any]:
    """The tensors of the module's table, by name: [T, N], `observation` [T + 1, N], `final/…` [K]."""
    steps, count = max(column.rows for column in columns), len(columns)
    tokens = np.full((steps + 1, count), pad_id, np.int64)
    tensors: dict[str, Any] = {
        "observation": tokens,
        "action": tokens[1:],
        "reward": np.zeros((steps, count), np.float32),
        "log_prob": np.zeros((steps, count), np.float32),
        **{name: np.zeros((steps, count), np.bool_) for name in ("valid", "terminated", "truncated")},
    }
    ends: list[tuple[int, int]] = []
    for slot, column in enumerate(columns):
        tokens[: len(column.ids), slot] = column.ids
        for turn in column.turns:
            rows = slice(turn.start - 1, turn.end - 1)
            tensors["valid"][rows, slot] = True
            tensors["log_prob"][rows, slot] = turn.log_prob
            tensors["reward"][turn.end - 2, slot] += turn.reward
        if column.turns:
            last = column.turns[-1].end - 2
            tensors["terminated" if column.terminated else "truncated"][last, slot] = True
            ends.append((last, slot))
    step, slot_of = np.array(sorted(ends), np.int32).reshape(-1, 2).T
    final = {"final/slot": slot_of, "final/step": step, "final/observation": tokens[step + 1, slot_of]}
    return {**tensors, **final}


def weight_spans(columns: Sequence[Column], steps: int) -> tuple[WeightSpan, ...]:
    """Return which weights sampled what.

    One span of all steps where they are the same everywhere, else one a turn.

    steps: T of the fragment. Raises ValueError where nothing was sampled.
    """
    sampled = {(turn.version, turn.update) for column in columns for turn in column.turns}
    if not sampled:
        raise ValueError("columns: nothing was sampled in any of them, so no weights did it")
    if len(sampled) == 1:
        ((version, update),) = sampled
        return (WeightSpan(0, 0, steps, version, update),)
    return tuple(
        WeightSpan(slot, turn.start - 1, len(turn.log_prob), turn.version, turn.update)
        for slot, column in enumerate(columns)
        for turn in column.turns
    )
