"""A batch of responses as one fragment: a response is an episode, a column its tokens.

    row t            0 … P−2           P−1 … P+L−2                                    behind
    observation[t]   prompt            prompt's last token, then the response         pad
    action[t]        prompt            the response's tokens                          pad
    valid[t]         false             true                                           false
    reward[t]        0                 0 … 0, at the last token the response's        0

P tokens of prompt, L of response, T = the largest P + L − 1. `observation[T]` is one row more. The episode
ends at its last token: `terminated` with `<eos>`, `truncated` where the most tokens were reached. A response
without a reward is no experience: its column holds the tokens and is valid nowhere.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from penstock.config.settings import ConfigurationError
from penstock.wire.fragment import Fragment
from penstock.wire.limits import MAX_ATTRIBUTES_BYTES
from penstock.wire.messages import Episode
from penstock.wire.schema import FragmentSchema
from penstock.wire.tensor import Array
from workloads.language.generation.backend import Generated
from workloads.language.generation.prompt_set import Asked
from workloads.language.reward.reward_source import ScoredBy
from workloads.plugin.fragments import Ends, Episodes, HeaderFields, LearnerReward, make


@dataclass(frozen=True, slots=True)
class Scored:
    """Responses with their rewards: one prompt, response and reward (or None) per column."""

    asked: Sequence[Asked]
    generated: Generated
    rewards: Sequence[float | None]
    by: ScoredBy | None


class TokenFragments:
    """Makes fragments of one run and numbers the episodes of each slot."""

    def __init__(
        self, schema: FragmentSchema, slots: int, pad_id: int, reward: LearnerReward | None = None
    ) -> None:
        """Raises ConfigurationError for a schema with tensors that responses do not have."""
        self._schema, self._pad, self._reward = schema, pad_id, reward
        self._episodes = Episodes(slots)
        known = set(_tensors_of([Asked(0, "", (0,))], _NOTHING, (None,), pad_id))
        unknown = sorted(schema.by_name.keys() - known)
        if unknown:
            raise ConfigurationError(
                f"schema: tensors {unknown} are not made by a generator of language models"
            )

    def restart(self, slots: int) -> None:
        """For another session."""
        self._episodes = Episodes(slots)

    def cut(self, scored: Scored, fields: HeaderFields) -> tuple[Fragment, list[Episode]]:
        """The fragment and the episodes that ended in it, with the rewards as they were given."""
        tensors = _tensors_of(scored.asked, scored.generated, scored.rewards, self._pad)
        slots = self._episodes.slots()
        ends = Ends(tensors["final/slot"], tensors["final/step"])
        episodes = self._episodes.advance(
            tensors["reward"], tensors["valid"], tensors["terminated"], ends, fields.weights.version
        )
        if self._reward is not None:
            tensors["reward"] = self._reward(tensors)
        header = fields.header(self._schema, len(tensors["reward"]), slots, _attributes(scored))
        return make(header, tensors), episodes


_NOTHING: Final = Generated(
    tokens=np.zeros((1, 1), np.int64),
    log_prob=np.zeros((1, 1), np.float32),
    lengths=np.ones(1, np.int64),
    ended=np.zeros(1, np.bool_),
    whole=np.zeros(1, np.bool_),
)


def _tensors_of(
    asked: Sequence[Asked], generated: Generated, rewards: Sequence[float | None], pad_id: int
) -> dict[str, Any]:
    """The tensors of the module's table, by name."""
    rows = [(*one.ids, *generated.response(index)) for index, one in enumerate(asked)]
    steps, count = max(1, *(len(row) - 1 for row in rows)), len(rows)
    tokens = np.full((steps + 1, count), pad_id, np.int64)
    tensors: dict[str, Array] = {
        "observation": tokens,
        "action": tokens[1:],
        "reward": np.zeros((steps, count), np.float32),
        "log_prob": np.zeros((steps, count), np.float32),
        **{name: np.zeros((steps, count), np.bool_) for name in ("valid", "terminated", "truncated")},
    }
    ends: list[tuple[int, int]] = []
    for slot, row in enumerate(rows):
        tokens[: len(row), slot] = row
        reward = rewards[slot]
        if reward is not None and generated.lengths[slot]:
            first, last = len(asked[slot].ids) - 1, len(row) - 2
            tensors["valid"][first : last + 1, slot] = True
            tensors["log_prob"][first : last + 1, slot] = generated.log_prob[slot, : generated.lengths[slot]]
            tensors["reward"][last, slot] = reward
            tensors["terminated" if generated.ended[slot] else "truncated"][last, slot] = True
            ends.append((last, slot))
    step, slot_of = np.array(sorted(ends), np.int32).reshape(-1, 2).T
    final = {"final/slot": slot_of, "final/step": step, "final/observation": tokens[step + 1, slot_of]}
    return {**tensors, **final}


def _attributes(scored: Scored) -> bytes:
    """Of which prompts, how the responses ended, whose rewards: JSON; the prompts only where they fit."""
    generated = scored.generated
    ways = Counter(
        "stopped" if not whole else "eos" if ended else "length"
        for whole, ended in zip(generated.whole.tolist(), generated.ended.tolist(), strict=True)
    )
    said: dict[str, Any] = {
        "finish": dict(ways),
        "unrewarded": sum(one is None for one in scored.rewards),
    }
    if scored.by is not None:
        said["reward"] = {"name": scored.by.name[-200:], "sha256": scored.by.sha256}
    full = {**said, "prompts": [one.index for one in scored.asked]}
    encoded = json.dumps(full, separators=(",", ":")).encode()
    return encoded if len(encoded) <= MAX_ATTRIBUTES_BYTES else json.dumps(said).encode()
