"""Prompts: read, tokenised, and divided into those that train and those that are held out.

Which side a prompt is on depends on the seed and its text alone, as for feedback. A row without a prompt, or
with one that leaves no room for a response, is named and counted.
"""

import json
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.config.settings import ConfigurationError
from penstock.protocol.fragment import Fragment
from penstock.protocol.limits import MAX_ATTRIBUTES_BYTES
from penstock.protocol.messages import Episode
from penstock.protocol.schema import FragmentSchema
from penstock.workloads.language.conversation.live_conversation import Column, ColumnFragments, SampledTurn
from penstock.workloads.language.feedback.examples import BadRows, place_of
from penstock.workloads.language.feedback.feedback_places import rows_of
from penstock.workloads.language.generation.cached_generation import Generated
from penstock.workloads.language.prompt import Prompt, identity, parse_prompt
from penstock.workloads.language.reward.reward_source import ScoredBy
from penstock.workloads.language.tokenizer import Encoder
from penstock.workloads.plugin.fragments import HeaderFields, LearnerReward

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt. index: its place among all distinct prompts, on whichever side."""

    index: int
    prompt: Prompt
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prompts:
    """Distinct prompts in the order of the source."""

    train: tuple[Asked, ...]
    held_out: tuple[Asked, ...]
    bad: BadRows


def read_prompts(place: str, encoder: Encoder, *, held_out: float, seed: int) -> Prompts:
    """Return the prompts at a place.

    encoder: `max_tokens` is the most that a prompt may have. held_out: share of them.

    Raises ConfigurationError for a place that cannot be read, or where a side is left without a prompt.
    """
    bad, found = BadRows(), dict[str, Asked]()
    for where, row in rows_of(place):
        try:
            prompt = parse_prompt(_prompt_of(row))
            ids = tuple(encoder.prompt_ids(prompt))
            _check_length(ids, encoder.max_tokens)
            found.setdefault(identity(prompt), Asked(len(found), prompt, ids))
        except ValueError as error:
            bad.add(where, str(error))
    for line in bad.lines():
        log.warning("bad row: %s", line)
    order = sorted(found, key=lambda name: place_of(name, seed))
    held = set(order[: max(1, round(held_out * len(order)))] if held_out else ())
    train, asked_later = (
        tuple(one for name, one in found.items() if (name in held) is side) for side in (False, True)
    )
    if not train:
        lines = "\n".join(bad.lines())
        raise ConfigurationError(
            f"environment.kwargs.prompts={place}: {len(found)} prompts can be used and "
            f"{len(asked_later)} of them are held out: none is left to train on\n{lines}".rstrip()
        )
    return Prompts(train, asked_later, bad)


def _prompt_of(row: Any) -> Any:
    if isinstance(row, ValueError):
        raise row
    if row.get("prompt") is None:
        raise ValueError("no prompt")
    return row["prompt"]


def _check_length(ids: Sequence[int], most: int) -> None:
    if not 1 <= len(ids) <= most:
        raise ValueError(
            f"the prompt has {len(ids)} tokens, 1 to {most} are allowed: actor.unroll_length + 1 holds the "
            "prompt and the response"
        )


def in_random_order(prompts: Sequence[Asked], seed: int) -> Iterator[Asked]:
    """Without end: all of them in one order, all again in another, and so on; equal for equal seeds."""
    random = np.random.default_rng(seed)
    while True:
        for index in random.permutation(len(prompts)):
            yield prompts[index]


# ---- A batch of responses as one fragment: a response is an episode, a column its tokens.


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
