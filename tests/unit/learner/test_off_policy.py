from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.config.settings import ConfigurationError, DQNSection, PolicySection, SACSection
from penstock.learner.algorithms.off_policy.dqn import DQN, epsilon, huber
from penstock.learner.algorithms.off_policy.memory import transitions
from penstock.learner.algorithms.off_policy.sac import SAC
from penstock.learner.algorithms.rows import see
from penstock.learner.batch import Batch
from penstock.policy.policy import build
from penstock.protocol.spaces import Dict, Discrete, MultiDiscrete
from tests.support.experience.experience import box
from tests.support.experience.remembering import ACTION, ACTIONS, OBSERVATION, Actor, entry_of
from tests.support.experience.replay_worlds import (
    STATES,
    corridor,
    corridor_values,
    one_shot,
    q_policy,
    read,
    soft_policy,
)

DISCOUNT = 0.9
SMALL: dict[str, Any] = {
    "discount": DISCOUNT,
    "capacity": 300,
    "learning_starts": 64,
    "batch_size": 32,
    "error_steps": 64,
    "learning_rate": 3e-3,
    "target_period": 20,
    "publish_period": 20,
}


def make(seed: int = 0, policy: dict[str, Any] | None = None, **section: Any) -> DQN:
    settings = DQNSection(**(SMALL | section))
    return DQN(q_policy(settings, **(policy or {})), settings, seed=seed)


def learned(algorithm: DQN) -> np.ndarray[Any, Any]:
    states = {"observation": torch.eye(STATES)[:-1]}
    with torch.no_grad():
        outputs = algorithm.policy.outputs(algorithm.policy.read(states))
    values: np.ndarray[Any, Any] = outputs.parameters.numpy()
    return values


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"double": False, "target_period": 1, "target_rate": 0.05},
        {"prioritised": True},
        {"n_step": 3},
        {"policy": {"dueling": True}},
    ],
    ids=["double", "single, Polyak", "prioritised", "n-step", "dueling"],
)
def test_dqn_finds_the_values_of_the_corridor(options: dict[str, Any]) -> None:
    algorithm = make(replay_ratio=1.0, **options)
    for number in range(1, 21):
        assert algorithm.update(corridor(number), progress=0.0).applied
    values, optimal = learned(algorithm), corridor_values(DISCOUNT)
    assert (values.argmax(1) == 1).all()
    if "n_step" not in options:
        np.testing.assert_allclose(values, optimal, atol=0.08)


def test_gradient_steps_follow_the_set_ratio() -> None:
    assert [make(error_steps=steps).budget(32) for steps in (64, 200)] == [64, 200]
    algorithm = make(replay_ratio=0.5)
    made = [algorithm.update(corridor(number), progress=0.0).gradient_steps for number in range(1, 11)]
    assert made[0] == 0
    assert sum(made) == (10 * 32 - 64) // 2
    assert made[2:] == [16] * 8
    assert algorithm.updates == 10


def test_an_update_of_many_gradient_steps_ends_soon_when_the_learner_stops() -> None:
    algorithm = make(replay_ratio=1.0)
    algorithm.is_stopping = lambda: True
    made = [algorithm.update(corridor(number), progress=0.0) for number in (1, 2, 3)]
    assert [(update.applied, update.gradient_steps) for update in made] == [(True, 0), (True, 0), (True, 1)]
    algorithm.is_stopping = lambda: False
    assert algorithm.update(corridor(4), progress=0.0).gradient_steps == 2 * 32 - 1


def test_a_version_is_published_after_enough_updates() -> None:
    algorithm = make(replay_ratio=0.5, publish_period=40)
    published = [algorithm.update(corridor(number), progress=0.0).publish for number in range(1, 9)]
    # 0, 0, 16, 16, 16, ... gradient steps.
    assert published == [False, False, False, False, True, False, False, True]


def poisoned(batch: Batch) -> Batch:
    reward = batch.reward.clone()
    reward[0] = 3e38
    return replace(batch, reward=reward * 10)


@pytest.mark.parametrize("prioritised", [False, True])
def test_a_non_finite_batch_is_removed_from_replay(*, prioritised: bool) -> None:
    algorithm = make(prioritised=prioritised, policy={"normalise_observations": True})
    for number in (1, 2, 3):
        assert algorithm.update(corridor(number), progress=0.0).applied
    update = algorithm.update(poisoned(corridor(4)), progress=0.0)
    assert (update.applied, update.reason, update.publish) == (False, "nan", False)
    assert algorithm.update(corridor(5), progress=0.0).applied
    assert [entry.number for entry in algorithm.replay.entries] == [1, 2, 3, 5]


@pytest.mark.promise("replay-makes-updates-fail")
@pytest.mark.parametrize("prioritised", [False, True])
def test_a_bad_entry_already_in_replay_is_removed(*, prioritised: bool) -> None:
    algorithm = make(prioritised=prioritised, learning_starts=96)
    for number in range(1, 12):
        batch = poisoned(corridor(2)) if number == 2 else corridor(number)
        update = algorithm.update(batch, progress=0.0)
        assert update.applied
        assert number > 2 or not update.gradient_steps
    assert update.gradient_steps
    assert 2 not in [entry.number for entry in algorithm.replay.entries]
    assert 3 in [entry.number for entry in algorithm.replay.entries]
    assert torch.isfinite(algorithm.policy.actor_head.weight).all()


def test_a_memory_restored_too_small_is_filled_before_use() -> None:
    first, second = make(), make()
    for number in range(1, 11):
        first.update(corridor(number), progress=0.0)
    second.load(first.state())
    assert second.end_reload() == len(first.replay.entries) > 0
    made = [second.update(corridor(number), progress=0.0).gradient_steps for number in (11, 12, 13)]
    assert made[0] == 0
    assert made[2] > 0


@pytest.mark.parametrize(
    "changed",
    [{"replay_ratio": 1.0}, {"batch_size": 64}, {"batch_size": 16}, {"replay_ratio": 0.125}],
    ids=lambda changed: "-".join(f"{name}={value}" for name, value in changed.items()),
)
def test_a_resume_with_another_ratio_or_batch_continues_learning(changed: dict[str, Any]) -> None:
    start: dict[str, Any] = {"replay_ratio": 0.25, "batch_size": 32}
    first, second = make(**start), make(**(start | changed))
    for number in range(1, 13):
        first.update(corridor(number), progress=0.0)
    second.load(first.state())
    for number in range(1, 13):
        second.reload(corridor(number))
    second.end_reload()
    made = [second.update(corridor(number), progress=0.0).gradient_steps for number in range(13, 21)]
    assert sum(made) == pytest.approx(8 * 32 * second.section.replay_ratio, abs=1)


def test_epsilon_falls_linearly_over_its_share_of_the_run() -> None:
    section = DQNSection(epsilon_initial=1.0, epsilon_final=0.1, epsilon_fraction=0.2, epsilon_spread=7.0)
    found = [epsilon(section, progress) for progress in (0.0, 0.1, 0.2, 1.0)]
    assert found == pytest.approx([1.0, 0.55, 0.1, 0.1])
    assert epsilon(DQNSection(epsilon_final=0.1, epsilon_fraction=0.0), 0.0) == pytest.approx(0.1)
    assert DQN(q_policy(section), section, seed=0).scalars(1.0) == pytest.approx(
        {"epsilon": 0.1, "epsilon_spread": 7.0}
    )


def test_huber_and_its_slope_are_torchs() -> None:
    error = torch.linspace(-3, 3, 13, requires_grad=True)
    weight = torch.rand(13, generator=torch.Generator().manual_seed(0))
    each = torch.nn.functional.smooth_l1_loss(error, torch.zeros(13), reduction="none")
    (slope,) = torch.autograd.grad((weight * each).mean(), error)
    given = huber(error, weight)
    torch.testing.assert_close(given, (weight * each).mean())
    torch.testing.assert_close(torch.autograd.grad(given, error)[0], slope)


@pytest.mark.parametrize("dense", [True, False])
def test_a_forbidden_action_is_no_next_action(*, dense: bool) -> None:
    algorithm, batch = make(learning_rate=0.0, target_period=1), corridor(1)
    algorithm._chain = algorithm._chain if dense else None
    allowed = torch.ones(*batch.observation["observation"].shape[:2], 2, dtype=torch.bool)
    free, bound = (
        replace(batch, observation=batch.observation | {"mask/action": mask})
        for mask in (allowed, allowed & torch.tensor([False, True]))
    )
    targets = []
    for given in (free, bound):
        ((_, fragment),) = given.fragments()
        stack = algorithm.policy.memory.frames
        rows = read(transitions(fragment, stack, discount=DISCOUNT, steps=1), stack)
        targets.append(algorithm._values(rows)[1] - rows.reward)
        values = algorithm.policy.outputs(
            algorithm.policy.read({"observation": rows.following["observation"]})
        )
        expected = values.parameters[:, 1] if given is bound else values.parameters.amax(1)
        torch.testing.assert_close(targets[-1], rows.discount * expected.detach())
    assert (targets[0] > targets[1]).any()


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"recurrent": "gru"}, "set policy.frame_stack instead"),
        ({"dropout": 0.1}, "policy.dropout"),
        ({"hidden_norm": "batch"}, "hidden_norm='layer'"),
    ],
)
def test_policies_that_single_steps_cannot_train_are_refused(policy: dict[str, Any], message: str) -> None:
    make(policy={"hidden_norm": "layer"})
    with pytest.raises(ConfigurationError, match=message):
        make(policy=policy)


@pytest.mark.promise("replay-holds-observation-once")
@pytest.mark.parametrize("normalise", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_stack_of_frames_is_learned_from(*, normalise: bool) -> None:
    section = DQNSection(
        **(SMALL | {"replay_ratio": 0.5, "discount": 0.0, "error_steps": 512, "capacity": 2000})
    )
    given = PolicySection(frame_stack=2, hidden_sizes=(32,), normalise_observations=normalise)
    policy = build(OBSERVATION, ACTION, section.policy_section(given), 0)
    algorithm, actor = DQN(policy, section, seed=0), Actor(policy, slots=8, longest=40, unroll=32)
    random = torch.Generator().manual_seed(0)
    for number in range(1, 9):
        batch = told_by_the_one_before(entry_of(actor.fragment(32), number), random)
        assert algorithm.update(batch, progress=0.0).applied
    batch = told_by_the_one_before(entry_of(actor.fragment(32), 9), random)
    inputs = see(policy, batch).inputs
    best = policy.outputs(inputs).parameters.argmax(1)[: batch.valid.numel()].view_as(batch.valid)
    right = batch.reward.new_zeros(batch.valid.shape, dtype=torch.int64)
    right[1:] = (batch.observation["observation"][:-2, :, 0] > 0).long()
    assert (best == right)[batch.valid].float().mean() > 0.9


def told_by_the_one_before(batch: Batch, random: torch.Generator) -> Batch:
    """Random actions, rewarded 1 for the sign of the observation before; valid where there is one."""
    assert batch.begins is not None
    action = torch.randint(ACTIONS, batch.valid.shape, generator=random)
    reward, known = torch.zeros_like(batch.reward), ~batch.begins[:-1]
    known[0] = False
    reward[1:] = (action[1:] == (batch.observation["observation"][:-2, :, 0] > 0).long()).float()
    return replace(batch, action={"action": action}, reward=reward, valid=batch.valid & known)


BEST = 0.4
SAC_SMALL: dict[str, Any] = {
    "capacity": 1000,
    "learning_starts": 64,
    "batch_size": 64,
    "error_steps": 64,
    "learning_rate": 5e-3,
    "critic_hidden_sizes": (32,),
    "publish_period": 20,
}


def sac_make(seed: int = 0, policy: dict[str, Any] | None = None, **section: Any) -> SAC:
    settings = SACSection(**(SAC_SMALL | section))
    return SAC(soft_policy(settings, **(policy or {})), settings, seed=seed)


def test_sac_finds_the_best_action_and_the_target_entropy() -> None:
    algorithm = sac_make(target_entropy=-1.0, temperature=0.2)
    entropy = 0.0
    for number in range(1, 12):
        update = algorithm.update(one_shot(algorithm.policy, number, BEST), progress=0.0)
        entropy = update.metrics.get("entropy", 0.0)
    states = {"observation": np.random.default_rng(0).uniform(-1, 1, (64, 2)).astype(np.float32)}
    mean = np.tanh(algorithm.policy.act(states, deterministic=True).action["action"])
    assert np.abs(mean - BEST).max() < 0.15
    assert entropy == pytest.approx(-1.0, abs=0.25)


@pytest.mark.parametrize(
    ("maker", "section", "space", "message"),
    [
        (DQN, DQNSection(), MultiDiscrete((2, 3)), r"algorithm\.name='dqn'.*MultiDiscrete.*'ppo'"),
        (SAC, SACSection(), Discrete(2), r"algorithm\.name='sac'.*Discrete.*'dqn'"),
    ],
    ids=["dqn", "sac"],
)
def test_other_action_spaces_are_refused_with_the_algorithm_for_them(
    maker: Any, section: Any, space: Any, message: str
) -> None:
    policy = build(box(4), space, section.policy_section(PolicySection()), 0)
    with pytest.raises(ConfigurationError, match=message):
        maker(policy, section, seed=0)


def test_the_actor_is_published_alone_and_the_critics_are_stored() -> None:
    algorithm = sac_make()
    (published,) = algorithm.published_modules().values()
    assert not any("critics" in name for name in published.state_dict())
    names = algorithm.state().tensors
    assert {"critics/both.0.head.weight", "target/both.1.head.weight", "temperature/log"} <= names.keys()
    assert algorithm.policy.values({"observation": np.ones((3, 2), np.float32)}).tolist() == [0.0, 0.0, 0.0]


def test_an_untuned_temperature_stays_constant() -> None:
    algorithm = sac_make(tune_temperature=False, temperature=0.3)
    for number in (1, 2):
        update = algorithm.update(one_shot(algorithm.policy, number, BEST), progress=0.0)
    assert update.metrics["temperature"] == pytest.approx(0.3)


def test_actions_in_parts_are_learned_together() -> None:
    section = SACSection(**SAC_SMALL)
    space = Dict((("arm", box(2)), ("leg", box(1, low=0.0, high=3.0))))
    policy = build(box(2), space, section.policy_section(PolicySection(hidden_sizes=(16,))), 0)
    algorithm = SAC(policy, section, seed=0)
    observation = torch.rand(5, 2)
    action, log_prob = algorithm._draw(policy.read({"observation": observation}))
    assert action.shape == (5, 3)
    raw = torch.atanh(action.double()).float()
    parts = {"action/arm": raw[:, :2], "action/leg": raw[:, 2:]}
    outputs = policy.outputs(policy.read({"observation": observation}))
    again = policy.joint_log_prob(outputs.parameters, parts)
    torch.testing.assert_close(again, log_prob, rtol=1e-3, atol=1e-3)


def masked_corridor(number: int) -> Batch:
    """Forbid an action that was not taken by chance."""
    batch = corridor(number)
    shape = (*batch.observation["observation"].shape[:2], 2)
    allowed = torch.rand(shape, generator=torch.Generator().manual_seed(number)) < 0.8
    allowed[:-1].scatter_(2, batch.action["action"].unsqueeze(2).long(), value=True)
    allowed[-1] = True
    return replace(batch, observation=batch.observation | {"mask/action": allowed})


def hopping(number: int) -> Batch:
    """Two parts of an action, [-1, 1] and [0, 3], in long episodes."""
    batch, random = corridor(number), torch.Generator().manual_seed(number)
    shape = batch.reward.shape
    action = {"action/arm": torch.randn(*shape, 2, generator=random)}
    action["action/leg"] = torch.randn(*shape, 1, generator=random)
    return replace(batch, action=action)


def in_float64(kind: str, **policy: Any) -> DQN | SAC:
    options = {"max_gradient_norm": 0.5, "target_rate": 0.1, "target_period": 1, "prioritised": True}
    given = {"hidden_sizes": (20, 24), "activation": "relu"} | policy
    if kind == "sac":
        section = SACSection(**(SMALL | options | {"critic_hidden_sizes": (24, 20)}))
        space = Dict((("arm", box(2)), ("leg", box(1, low=0.0, high=3.0))))
        drawn = build(box(STATES), space, section.policy_section(PolicySection(**given)), 0)
        return SAC(drawn.double(), section, seed=0)
    settings = DQNSection(**(SMALL | options | {"double": kind == "double"}))
    return DQN(q_policy(settings, **given).double(), settings, seed=0)


@pytest.mark.parametrize("policy", [{}, {"activation": "tanh"}, {"hidden_sizes": ()}], ids=str)
@pytest.mark.parametrize(
    ("kind", "batch"),
    [("double", masked_corridor), ("single", masked_corridor), ("sac", hopping)],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_gradient_steps_without_a_graph_equal_those_of_autograd(
    kind: str, batch: Any, policy: dict[str, Any]
) -> None:
    dense, plain = in_float64(kind, **policy), in_float64(kind, **policy)
    held = "_chains" if kind == "sac" else "_chain"
    assert getattr(dense, held) is not None
    setattr(plain, held, None)
    for number in range(1, 5):
        made, expected = (each.update(batch(number), progress=0.0) for each in (dense, plain))
        assert made.applied
        assert made.metrics == pytest.approx(expected.metrics, rel=1e-9, abs=1e-9)
    assert made.gradient_steps > 30
    for name, tensor in dense.state().tensors.items():
        torch.testing.assert_close(
            tensor.double(), plain.state().tensors[name].double(), rtol=1e-9, atol=1e-9, msg=name
        )


@pytest.mark.parametrize(
    "policy", [{"dueling": True}, {"activation": "silu"}, {"hidden_norm": "layer"}], ids=str
)
def test_networks_that_are_no_chain_are_learned_by_autograd(policy: dict[str, Any]) -> None:
    algorithm = make(policy=policy)
    assert algorithm._chain is None
    assert all(algorithm.update(corridor(number), progress=0.0).applied for number in (1, 2, 3))
