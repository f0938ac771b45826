"""Where the advantages of tokens vanish: at the policy that the reward and its penalty ask for."""

import math
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.config.algorithm_sections import TokenPPOSection
from penstock.learner.algorithms.responses import prepare, read_responses
from tests.support.experience.token_experience import Response, batch_of, fragment

Kind = Literal["gae", "group", "reinforce"]

VOCABULARY = 11
REWARDS = np.random.default_rng(0).uniform(-1.0, 1.0, VOCABULARY)
REFERENCE = np.random.default_rng(1).dirichlet(np.ones(VOCABULARY))


def advantages(policy: np.ndarray, beta: float, value: float, advantage: Kind, *, whiten: bool) -> Tensor:
    """Of every token once, one token to a response, under π_prox = `policy`."""
    given = [
        Response((2,), (token,), (math.log(policy[token]),), float(REWARDS[token]), True)
        for token in range(VOCABULARY)
    ]
    responses = read_responses(batch_of(fragment(given)))
    assert responses is not None
    section = TokenPPOSection(
        advantage=advantage, normalise_advantages=whiten, kl_coefficient=beta, log_ratio_bound=30.0
    )
    logs = [torch.from_numpy(np.log(one)).float() for one in (policy, REFERENCE)]
    read = torch.stack([logs[0], torch.zeros(VOCABULARY), torch.full((VOCABULARY,), value), logs[1]])
    advantages: torch.Tensor = prepare(responses, read, section, beta).weighted_advantage
    return advantages


@pytest.mark.parametrize("whiten", [True, False])
@pytest.mark.parametrize("advantage", ["gae", "group", "reinforce"])
@pytest.mark.parametrize("beta", [0.1, 0.5, 1.0])
def test_nothing_pulls_away_from_the_best_policy(beta: float, advantage: Kind, whiten: bool) -> None:
    unit = float(REWARDS.std()) if advantage == "group" and whiten else 1.0
    gain = REWARDS / unit / beta
    normaliser = float(REFERENCE @ np.exp(gain))
    best = REFERENCE * np.exp(gain) / normaliser
    value = beta * math.log(normaliser)
    assert advantages(best, beta, value, advantage, whiten=whiten).abs().max() < (0.05 if whiten else 1e-5)
    pulled = advantages(best, 2.0 * beta, value, advantage, whiten=whiten)
    assert pulled.std() > 0.3
