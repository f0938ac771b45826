"""One prompt, one token: π*(y) ∝ π_ref(y) · exp(r(y)/β) is known, and the language learner has to find it.

The whole way in one process: a published adapter is loaded into another policy, which samples; what it
sampled is cut into real fragments, assembled and learned from.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penstock.config.algorithm_sections import TokenPPOSection
from penstock.learner.algorithms.token_ppo import TokenPPO
from penstock.policy import weights
from penstock.workloads.language.policy import LanguagePolicy, LanguageSection
from tests.support.experience.token_experience import Response, batch_of, fragment, next_log_probs
from tests.support.language.known_sentiment import optimal
from tests.support.language.tiny_models import make_base

PROMPT: Final = (1,)
RESPONSES: Final = 256
LONG: Final = 200
SHORT: Final = 60
TARGETS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
"""All linear layers, the last one too.

Rows of this model's vocabulary are so short, and the features of a fixed norm, that without it no adapter
makes a token much more likely than others.
"""
SETTINGS: Final[Mapping[str, Any]] = {
    "learning_rate": 1e-2,
    "learning_rate_schedule": "linear",
    "critic_learning_rate": 1e-2,
    "epochs": 2,
    "minibatches": 1,
}


ESTIMATES: Final[Mapping[str, Mapping[str, Any]]] = {
    "gae": {},
    "group": {"normalise_advantages": False},
    "reinforce": {},
}
"""Settings beside each estimate. A group's deviation would make β one per deviation of the scores."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Total variation between π and π*, KL(π‖π_ref) and E[r] of both, exactly."""

    distance: float
    kl: float
    best_kl: float
    reward: float
    best_reward: float


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny language model in a folder."""
    return make_base(tmp_path_factory.mktemp("tiny") / "base")


def learned(
    base: Path,
    beta: float,
    seed: int,
    updates: int,
    critic: Literal["head", "adapter"] = "head",
    **settings: Any,
) -> Outcome:
    """What is reached after so many updates."""
    section = TokenPPOSection(**{**SETTINGS, "kl_coefficient": beta, **settings})
    policy, actor = _policy(base, seed, critic), _policy(base, seed)
    algorithm = TokenPPO(policy, section, seed=seed)
    rng = np.random.default_rng(seed)
    rewards = rng.uniform(-1.0, 1.0, policy.vocabulary)
    reference = _probabilities(policy)
    for update in range(updates):
        weights.load_into(actor, weights.encode(algorithm.published_modules()["default"]))
        sampled = fragment(_sampled(actor, rewards, rng), vocabulary=policy.vocabulary, update=update)
        assert algorithm.update(batch_of(sampled), progress=update / updates).applied
    return _outcome(reference, _probabilities(policy), rewards, beta)


def _policy(base: Path, seed: int, critic: Literal["head", "adapter"] = "head") -> LanguagePolicy:
    section = LanguageSection(model=str(base), rank=8, alpha=16.0, targets=TARGETS, critic=critic)
    return LanguagePolicy(section, seed)


def _probabilities(policy: LanguagePolicy) -> NDArray[np.float64]:
    log_probs = next_log_probs(policy, torch.tensor([PROMPT]), policy.vocabulary)
    found: NDArray[np.float64] = log_probs[0].double().softmax(0).numpy()
    return found


def _sampled(actor: LanguagePolicy, rewards: NDArray[np.float64], rng: np.random.Generator) -> list[Response]:
    chances = _probabilities(actor)
    return [
        Response(PROMPT, (int(token),), (float(np.log(chances[token])),), float(rewards[token]), True)
        for token in rng.choice(len(chances), size=RESPONSES, p=chances)
    ]


def _outcome(
    reference: NDArray[np.float64], found: NDArray[np.float64], rewards: NDArray[np.float64], beta: float
) -> Outcome:
    best = optimal(reference, rewards, beta)
    kl, best_kl = (float(one @ np.log(np.maximum(one, 1e-300) / reference)) for one in (found, best))
    distance = 0.5 * float(np.abs(found - best).sum())
    return Outcome(distance, kl, best_kl, float(found @ rewards), float(best @ rewards))


@pytest.mark.parametrize("advantage", ESTIMATES)
def test_the_best_policy_is_found(base: Path, advantage: str) -> None:
    outcome = learned(base, 0.5, 0, SHORT, advantage=advantage, **ESTIMATES[advantage])
    start = learned(base, 0.5, 0, 0)
    assert outcome.distance <= 0.05
    assert start.distance > 0.25


def test_the_best_policy_is_found_with_an_adapter_of_the_critics_own(base: Path) -> None:
    assert learned(base, 0.5, 0, SHORT, critic="adapter").distance <= 0.05


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("advantage", ESTIMATES)
def test_the_best_policy_is_found_at_every_coefficient(base: Path, advantage: str, seed: int) -> None:
    settings = {"advantage": advantage, **ESTIMATES[advantage]}
    outcomes = [learned(base, beta, seed, LONG, **settings) for beta in (0.1, 0.5, 1.0)]
    for outcome in outcomes:
        assert outcome.distance <= 0.05
        assert outcome.kl == pytest.approx(outcome.best_kl, rel=0.1)
        assert outcome.reward == pytest.approx(outcome.best_reward, rel=0.05)
    assert outcomes[0].kl > outcomes[1].kl > outcomes[2].kl
