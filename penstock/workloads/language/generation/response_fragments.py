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
from typing import Any

from penstock.protocol.fragment import Fragment
from penstock.protocol.limits import MAX_ATTRIBUTES_BYTES
from penstock.protocol.messages import Episode
from penstock.protocol.schema import FragmentSchema
from penstock.workloads.language.conversation.column import Column, SampledTurn
from penstock.workloads.language.conversation.column_fragments import ColumnFragments
from penstock.workloads.language.generation.backend import Generated
from penstock.workloads.language.generation.prompt_set import Asked
from penstock.workloads.language.reward.reward_source import ScoredBy
from penstock.workloads.plugin.fragments import HeaderFields, LearnerReward


@dataclass(frozen=True, slots=True)
class Scored:
    """Responses with their rewards: one prompt, response and reward (or None) per column."""

    asked: Sequence[Asked]
    generated: Generated
    rewards: Sequence[float | None]
    by: ScoredBy | None


class TokenFragments:
    """Makes fragments of one run: responses are columns of one turn (see `ColumnFragments`)."""

    def __init__(
        self, schema: FragmentSchema, slots: int, pad_id: int, reward: LearnerReward | None = None
    ) -> None:
        """Raises ConfigurationError for a schema with tensors that responses do not have."""
        self._columns = ColumnFragments(schema, slots, pad_id, reward)

    def restart(self, slots: int) -> None:
        """For another session."""
        self._columns.restart(slots)

    def cut(self, scored: Scored, fields: HeaderFields) -> tuple[Fragment, list[Episode]]:
        """Return the fragment and the episodes that ended in it, with the rewards as they were given."""
        columns = [_column(scored, row, fields) for row in range(len(scored.asked))]
        return self._columns.cut(columns, fields, _attributes(scored))


def _column(scored: Scored, row: int, fields: HeaderFields) -> Column:
    """A response behind its prompt; without a reward nothing of it counts as sampled."""
    generated, prompt, reward = scored.generated, scored.asked[row].ids, scored.rewards[row]
    ids = (*prompt, *generated.response(row))
    if reward is None or len(ids) == len(prompt):
        return Column(ids=ids)
    turn = SampledTurn(
        start=len(prompt),
        log_prob=tuple(generated.log_prob[row, : generated.lengths[row]].tolist()),
        version=fields.weights.version,
        update=fields.weights.update,
        reward=reward,
    )
    return Column(ids=ids, turns=(turn,), terminated=bool(generated.ended[row]))


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
