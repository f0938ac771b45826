"""The learner against what is known exactly.

A plain PPO that shares no code with it; endless returns; the best policy of one token, which is
π*(y) ∝ π_ref(y) · exp(r(y)/β); and a first turn that pays only in the third.
"""

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.actor.acting.stepper import Observation
from penstock.actor.rollout.generator import HeaderFields
from penstock.config.algorithm_sections import TokenPPOSection
from penstock.config.settings import PPOSection
from penstock.learner.algorithms.ppo import PPO
from penstock.learner.algorithms.token_ppo import TokenPPO
from penstock.learner.batch import Batch, assemble
from penstock.policy import weights
from penstock.policy.policy import Policy
from penstock.protocol.fragment import check
from penstock.protocol.messages import Publication
from penstock.protocol.schema import fragment_schema
from penstock.protocol.spaces import Discrete
from penstock.workloads.language.conversation import Column, ColumnFragments, SampledTurn
from penstock.workloads.language.policy import LanguagePolicy, LanguageSection
from tests.learning import small_form
from tests.support.experience import held_memory
from tests.support.experience.experience import Collector, Line, cartpoles, small_policy
from tests.support.experience.token_experience import (
    Response,
    SmallTokenPolicy,
    batch_of,
    fragment,
    next_log_probs,
)
from tests.support.language.known_sentiment import optimal
from tests.support.language.tiny_models import make_base
from tests.support.oracles import plain_ppo
from tests.support.oracles.plain_ppo import PlainPPO

CASES: dict[str, dict[str, Any]] = {
    "decoupled": {},
    "coupled": {"objective": "coupled"},
    "vtrace": {"advantage": "vtrace", "normalise_advantages": False},
    "every-term": {"entropy_coefficient": 0.01, "value_clip": 0.2, "minibatches": 3},
}


def layers(policy: Policy, part: str) -> list[tuple[Tensor, Tensor]]:
    state = policy.state_dict()
    names = [f"{part}_body.layers.0", f"{part}_body.layers.2", f"{part}_head"]
    return [(state[f"{name}.weight"].clone(), state[f"{name}.bias"].clone()) for name in names]


def permutations(ppo: PPO, count: int) -> list[Tensor]:
    generator = torch.Generator()
    generator.set_state(ppo.state().tensors["generator/permutations"])
    return [torch.randperm(count, generator=generator) for _ in range(ppo.section.epochs)]


@pytest.mark.promise("twenty-updates-give-parameters")
@pytest.mark.parametrize("normalise", [False, True], ids=["raw", "normalised"])
@pytest.mark.parametrize("name", CASES)
def test_twenty_updates_give_the_parameters_of_a_plain_ppo(name: str, *, normalise: bool) -> None:
    section = PPOSection(learning_rate=1e-3, **CASES[name])
    policy = small_policy(3, normalise_observations=normalise).double()
    plain = PlainPPO(layers(policy, "actor"), layers(policy, "critic"), section)
    if normalise:
        plain.normalise_observations()
    ppo = PPO(policy, section, seed=5)
    collectors = [Collector(cartpoles(3, max_episode_steps=30), session) for session in (1, 2)]
    late = collectors[0].fragment(policy, 16)
    for _ in range(20):
        # One of the two fragments is one update behind.
        fragments = [late, collectors[1].fragment(policy, 16)]
        late = collectors[0].fragment(policy, 16)
        batch = assemble(fragments, torch.device("cpu"))
        order = permutations(ppo, batch.valid.numel())
        plain.update([arrays for _, arrays in fragments], order)
        assert ppo.update(batch, progress=0.0).applied
    for part, network in (("actor", plain.actor), ("critic", plain.critic)):
        expected = [p.detach() for p in network.parameters()]
        found = [tensor for pair in layers(policy, part) for tensor in pair]
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.promise("twenty-updates-give-parameters")
def test_the_oracle_shares_no_code() -> None:
    tree = ast.parse(Path(plain_ppo.__file__).read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    assert not any(str(name).split(".")[0] in {"learner", "penstock"} for name in imported)


DISCOUNT = 0.9
SECTION = PPOSection(
    discount=DISCOUNT, value_clip=None, learning_rate=3e-3, epochs=4, minibatches=2, max_gradient_norm=0.0
)


def trained(how: str, updates: int = 150) -> Policy:
    policy = small_policy(1)
    ppo = PPO(policy, SECTION, seed=2)
    collector = Collector([Line(5, how) for _ in range(8)])
    for _ in range(updates):
        batch = assemble([collector.fragment(policy, 16)], torch.device("cpu"))
        assert ppo.update(batch, progress=0.0).applied
    return policy


def value(policy: Policy, shown: Observation) -> float:
    with torch.no_grad():
        return float(policy.value({path: torch.from_numpy(array) for path, array in shown.items()}))


@pytest.mark.promise("truncation-termination")
def test_only_truncation_learns_the_endless_return() -> None:
    found = value(trained("truncated"), {"observation": np.array([0, 1, 0, 0], np.float32)})
    assert abs(found - 1 / (1 - DISCOUNT)) < 0.05 / (1 - DISCOUNT)


@pytest.mark.promise("truncation-termination")
def test_termination_learns_the_reward_at_the_last_step() -> None:
    policy = trained("terminated")
    for position in range(5):
        expected = sum(DISCOUNT**k for k in range(5 - position))
        found = value(policy, {"observation": np.array([position / 5, 1, 0, 0], np.float32)})
        assert abs(found - expected) < 0.05 * expected


def values(kwargs: dict[str, Any], mask_key: str) -> list[float]:
    settings = small_form.settings_of(
        held_memory.TASK,
        1,
        60 * 64,
        environment={"count": 4, "kwargs": kwargs, "mask_key": mask_key},
        actor={"count": 1, "unroll_length": 16},
        policy={"hidden_sizes": [16]},
        algorithm={
            "discount": held_memory.DISCOUNT,
            "batch_steps": 64,
            "minibatches": 1,
            "learning_rate": 0.05,
            "learning_rate_schedule": "linear",
            "max_gradient_norm": 0.0,
            "scale_rewards": False,
        },
    )
    run, policy = small_form.trained(settings)
    stepper = run.make_environment(run.environment, 1, 0)
    first = value(policy, stepper.reset([0]))
    later = value(policy, stepper.step(np.zeros(1, np.int64)).observation)
    stepper.close()
    return [first, later]


@pytest.mark.promise("last-observation-episode-mask")
@pytest.mark.parametrize("way", held_memory.WAYS)
def test_the_endless_return_is_learned_with_reused_observation_memory(way: str) -> None:
    expected = [held_memory.FIRST_VALUE, held_memory.LATER_VALUE]
    assert values({"way": way}, "") == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("way", ["new", "one_dict_with_the_mask"])
def test_an_environment_that_raises_for_an_action_outside_its_mask_is_trained(way: str) -> None:
    expected = [held_memory.FIRST_VALUE, held_memory.LATER_VALUE]
    assert values({"way": way, "strict": True}, "mask") == pytest.approx(expected, rel=0.01)


PROMPT: Final = (1,)
RESPONSES: Final = 256
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
    distance: float
    kl: float
    best_kl: float
    reward: float
    best_reward: float


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("tiny") / "base")


def outcome_of(
    base: Path,
    beta: float,
    seed: int,
    updates: int,
    critic: Literal["head", "adapter"] = "head",
    **settings: Any,
) -> Outcome:
    section = TokenPPOSection(**{**SETTINGS, "kl_coefficient": beta, **settings})
    policy, actor = policy_of(base, seed, critic), policy_of(base, seed)
    algorithm = TokenPPO(policy, section, seed=seed)
    rng = np.random.default_rng(seed)
    rewards = rng.uniform(-1.0, 1.0, policy.vocabulary)
    reference = _probabilities(policy)
    for update in range(updates):
        weights.load_into(actor, weights.encode(algorithm.published_modules()["default"]))
        sampled = fragment(_sampled(actor, rewards, rng), vocabulary=policy.vocabulary, update=update)
        assert algorithm.update(batch_of(sampled), progress=update / updates).applied
    found, best = _probabilities(policy), optimal(reference, rewards, beta)
    kl, best_kl = (float(one @ np.log(np.maximum(one, 1e-300) / reference)) for one in (found, best))
    distance = 0.5 * float(np.abs(found - best).sum())
    return Outcome(distance, kl, best_kl, float(found @ rewards), float(best @ rewards))


def policy_of(base: Path, seed: int, critic: Literal["head", "adapter"] = "head") -> LanguagePolicy:
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


@pytest.mark.parametrize(
    ("advantage", "critic"), [*((name, "head") for name in ESTIMATES), ("gae", "adapter")]
)
def test_the_best_policy_is_found(base: Path, advantage: str, critic: Literal["head", "adapter"]) -> None:
    settings = {"advantage": advantage, **ESTIMATES[advantage]}
    assert outcome_of(base, 0.5, 0, 60, critic, **settings).distance <= 0.05
    assert outcome_of(base, 0.5, 0, 0).distance > 0.25


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("advantage", ESTIMATES)
def test_the_best_policy_is_found_at_every_coefficient(base: Path, advantage: str, seed: int) -> None:
    settings = {"advantage": advantage, **ESTIMATES[advantage]}
    outcomes = [outcome_of(base, beta, seed, 200, **settings) for beta in (0.1, 0.5, 1.0)]
    for outcome in outcomes:
        assert outcome.distance <= 0.05
        assert outcome.kl == pytest.approx(outcome.best_kl, rel=0.1)
        assert outcome.reward == pytest.approx(outcome.best_reward, rel=0.05)
    assert outcomes[0].kl > outcomes[1].kl > outcomes[2].kl


VOCABULARY: Final = 11
MESSAGES: Final = (2, 3, 4)
"""What is said before each of the three turns; a turn is one token."""
POLITE: Final = 9
CONVERSATIONS: Final = 64
Layout = Literal["conversation", "turn"]


@torch.no_grad()
def chance(policy: SmallTokenPolicy) -> float:
    return float(next_log_probs(policy, torch.tensor([[MESSAGES[0]]]), VOCABULARY)[0, POLITE].exp())


@torch.no_grad()
def conversations(policy: SmallTokenPolicy, generator: torch.Generator, update: int) -> list[Column]:
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
    return [Column(ids=column.ids[: turn.end], turns=(turn,)) for turn in column.turns]


def batch(columns: list[Column], update: int) -> Batch:
    schema = fragment_schema(Discrete(VOCABULARY), Discrete(VOCABULARY))
    weights = Publication(version=update + 1, update=update, sha256="", size=0)
    fields = HeaderFields(run="r", session=1, sequence=1, weights=weights, round=0)
    fragment, _ = ColumnFragments(schema, len(columns), 0).cut(columns, fields)
    check(fragment, schema, "r")
    return batch_of(fragment)


def chance_after(layout: Layout, seed: int) -> float:
    policy, generator = SmallTokenPolicy(seed), torch.Generator().manual_seed(seed)
    section = TokenPPOSection(
        kl_coefficient=0.0, learning_rate=1e-2, critic_learning_rate=1e-2, minibatches=1, turn_discount=0.9
    )
    algorithm = TokenPPO(policy, section, seed=seed)
    for update in range(40):
        columns = conversations(policy, generator, update)
        if layout == "turn":
            columns = [one for column in columns for one in split(column)]
        assert algorithm.update(batch(columns, update), progress=0.0).applied
    return chance(policy)


@pytest.mark.promise("first-turn-learns-third")
def test_a_first_turn_is_learned_from_what_the_third_earns() -> None:
    before = [chance(SmallTokenPolicy(seed)) for seed in range(3)]
    after = [chance_after("conversation", seed) for seed in range(3)]
    assert max(before) < 0.2
    assert min(after) > 0.9, (before, after)


@pytest.mark.promise("first-turn-learns-third", "agents-teach-served-model")
@pytest.mark.parametrize("seed", range(3))
def test_with_a_column_per_turn_the_first_turn_is_not_learned(seed: int) -> None:
    after = chance_after("turn", seed)
    assert after < 0.5, np.round([chance(SmallTokenPolicy(seed)), after], 3)
