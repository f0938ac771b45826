"""What the first turn says pays only in the third: whole conversations learn it, single turns do not."""

from typing import Final, Literal

import numpy as np
import pytest
import torch

from penstock.actor.rollout.generator import HeaderFields
from penstock.config.algorithm_sections import TokenPPOSection
from penstock.learner.algorithms.token_ppo import TokenPPO
from penstock.learner.batch import Batch
from penstock.protocol.fragment import check
from penstock.protocol.messages import Publication
from penstock.protocol.schema import fragment_schema
from penstock.protocol.spaces import Discrete
from penstock.workloads.language.conversation import Column, ColumnFragments, SampledTurn
from tests.support.experience.token_experience import SmallTokenPolicy, batch_of, next_log_probs

VOCABULARY: Final = 11
MESSAGES: Final = (2, 3, 4)
"""What is said before each of the three turns; a turn is one token."""
POLITE: Final = 9
CONVERSATIONS: Final = 64
UPDATES: Final = 40
Layout = Literal["conversation", "turn"]


@torch.no_grad()
def chance(policy: SmallTokenPolicy) -> float:
    """Of the word that pays, in the first turn."""
    return float(next_log_probs(policy, torch.tensor([[MESSAGES[0]]]), VOCABULARY)[0, POLITE].exp())


@torch.no_grad()
def conversations(policy: SmallTokenPolicy, generator: torch.Generator, update: int) -> list[Column]:
    """Whole ones; the third turn earns 1 where the first was polite."""
    tokens, chosen = torch.empty((CONVERSATIONS, 0), dtype=torch.long), []
    for message in MESSAGES:
        tokens = torch.cat([tokens, torch.full((CONVERSATIONS, 1), message)], 1)
        log_probs = next_log_probs(policy, tokens, VOCABULARY)
        drawn = torch.multinomial(log_probs.exp(), 1, generator=generator)
        tokens = torch.cat([tokens, drawn], 1)
        chosen.append(log_probs.gather(1, drawn)[:, 0].tolist())
    made = []
    for row, ids in enumerate(tokens.tolist()):
        rewards = (0.0, 0.0, float(ids[1] == POLITE))
        turns = tuple(
            SampledTurn(
                start=2 * n + 1,
                log_prob=(chosen[n][row],),
                version=update + 1,
                update=update,
                reward=rewards[n],
            )
            for n in range(3)
        )
        made.append(Column(ids=tuple(ids), turns=turns))
    return made


def split(column: Column) -> list[Column]:
    """A column for each turn, with what it earned itself."""
    return [Column(ids=column.ids[: turn.end], turns=(turn,)) for turn in column.turns]


def batch(columns: list[Column], update: int) -> Batch:
    """As actor, broker and learner make one of them."""
    schema = fragment_schema(Discrete(VOCABULARY), Discrete(VOCABULARY))
    weights = Publication(version=update + 1, update=update, sha256="", size=0)
    fields = HeaderFields(run="r", session=1, sequence=1, weights=weights, round=0)
    fragment, _ = ColumnFragments(schema, len(columns), 0).cut(columns, fields)
    check(fragment, schema, "r")
    return batch_of(fragment)


def learned(layout: Layout, seed: int) -> float:
    """The chance of the word that pays after all updates."""
    policy, generator = SmallTokenPolicy(seed), torch.Generator().manual_seed(seed)
    section = TokenPPOSection(
        kl_coefficient=0.0, learning_rate=1e-2, critic_learning_rate=1e-2, minibatches=1, turn_discount=0.9
    )
    algorithm = TokenPPO(policy, section, seed=seed)
    for update in range(UPDATES):
        columns = conversations(policy, generator, update)
        if layout == "turn":
            columns = [one for column in columns for one in split(column)]
        assert algorithm.update(batch(columns, update), progress=0.0).applied
    return chance(policy)


@pytest.mark.promise("first-turn-learns-third")
def test_a_first_turn_is_learned_from_what_the_third_earns() -> None:
    before = [chance(SmallTokenPolicy(seed)) for seed in range(3)]
    after = [learned("conversation", seed) for seed in range(3)]
    assert max(before) < 0.2
    assert min(after) > 0.9, (before, after)


@pytest.mark.promise("first-turn-learns-third", "agents-teach-served-model")
@pytest.mark.parametrize("seed", range(3))
def test_with_a_column_per_turn_it_is_not(seed: int) -> None:
    after = learned("turn", seed)
    assert after < 0.5, np.round([chance(SmallTokenPolicy(seed)), after], 3)
