from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.wrappers import FrameStackObservation
from torch import Tensor, distributions

from penstock.config.settings import DQNSection, PolicySection
from penstock.learner.algorithms.rows import see
from penstock.policy.acting.drawing import ExplorationSlots
from penstock.policy.distributions import (
    ActionHead,
    Bernoulli,
    Categorical,
    ConditionalSquashedGaussian,
    EpsilonGreedy,
    Gaussian,
    MultiCategorical,
    SquashedGaussian,
    head_of,
)
from penstock.policy.networks import masked
from penstock.policy.policy import Policy, QPolicy, build
from penstock.policy.recurrent import FrameStack
from penstock.protocol.schema import fragment_schema, mask_rules, state_rules
from penstock.protocol.spaces import (
    Box,
    Dict,
    Discrete,
    Leaf,
    MultiBinary,
    MultiDiscrete,
    Space,
    Tuple,
    leaves,
)
from tests.support.experience.experience import box, image
from tests.support.experience.remembering import Actor, Wandering, batch_of, remembering

LOG_STD = -0.4
WIDE = box(3, low=-2.0, high=6.0)
ROWS = 200


HEADS: dict[str, Callable[[], ActionHead]] = {
    "categorical": lambda: Categorical("action", Discrete(5, start=-2)),
    "multi-categorical": lambda: MultiCategorical("action", MultiDiscrete((2, 4, 3))),
    "bernoulli": lambda: Bernoulli("action", MultiBinary(4)),
    "gaussian": lambda: Gaussian("action", WIDE, LOG_STD),
    "squashed": lambda: SquashedGaussian("action", WIDE, LOG_STD),
    "squashed, conditional": lambda: ConditionalSquashedGaussian("action", WIDE, LOG_STD),
}


def parameters(head: ActionHead, rows: int = ROWS) -> Tensor:
    """Outputs of a network, [rows, size]."""
    return torch.randn(rows, head.size, generator=torch.Generator().manual_seed(1))


def by_torch(name: str, params: Tensor, action: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The log-probability that torch.distributions gives, and what it says of the distribution."""
    match name:
        case "categorical":
            choice = distributions.Categorical(logits=params)
            return choice.log_prob(action), {"probability": choice.probs}
        case "multi-categorical":
            parts = [distributions.Categorical(logits=one) for one in params.split([2, 4, 3], -1)]
            each = [part.log_prob(one) for part, one in zip(parts, action.unbind(-1), strict=True)]
            return torch.stack(each).sum(0), {"probability": torch.cat([part.probs for part in parts], -1)}
        case "bernoulli":
            bits = distributions.Bernoulli(logits=params)
            return bits.log_prob(action.float()).sum(-1), {"probability": bits.probs}
    mean, log_std = params.chunk(2, -1) if name.endswith("conditional") else (params, torch.zeros(()))
    normal = distributions.Normal(mean, (log_std + LOG_STD).clamp(-20, 2).exp())
    log_prob = normal.log_prob(action)
    if name != "gaussian":
        # By the slope at the action as drawn: the tanh of a wide one is 1, from which there is no way back.
        log_prob = log_prob - distributions.TanhTransform().log_abs_det_jacobian(action, action.tanh())
    return log_prob.sum(-1), {"mean": normal.mean, "std": normal.stddev}


@pytest.mark.parametrize("name", HEADS)
def test_sampled_actions_have_the_log_probability_of_torch(name: str) -> None:
    head = HEADS[name]()
    params = parameters(head)
    action, drawn = head.draw(params.numpy(), np.random.default_rng(0))
    action.setflags(write=False)
    stored = torch.from_numpy(action.copy())
    assert action.dtype == head.action_dtype
    evaluated = head.log_prob(params, stored).detach()
    torch.testing.assert_close(evaluated, torch.from_numpy(drawn), atol=2e-5, rtol=1e-5)
    expected, said = by_torch(name, params, stored)
    torch.testing.assert_close(evaluated, expected, atol=2e-4 if "squashed" in name else 2e-6, rtol=1e-5)
    np.testing.assert_allclose(head.chance(params.numpy(), action), drawn, atol=1e-4)
    described = head.describe(params.numpy())
    assert described.keys() == said.keys()
    for key, array in described.items():
        np.testing.assert_allclose(array, said[key], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", HEADS)
def test_entropy_is_the_mean_of_minus_log_probability(name: str) -> None:
    head = HEADS[name]()
    row = parameters(head, 1)
    _, drawn = head.draw(row.numpy().repeat(200_000, 0), np.random.default_rng(2))
    assert head.entropy(row).item() == pytest.approx(-drawn.mean(), abs=0.02)


@pytest.mark.parametrize("name", HEADS)
def test_the_mode_is_more_likely_than_a_sample(name: str) -> None:
    head = HEADS[name]()
    params = parameters(head)
    action, log_prob = head.mode(params.numpy())
    evaluated = head.log_prob(params, torch.from_numpy(np.asarray(action))).detach()
    torch.testing.assert_close(evaluated, torch.from_numpy(log_prob), atol=2e-5, rtol=1e-5)
    _, drawn = head.draw(params.numpy(), np.random.default_rng(3))
    if "squashed" not in name:
        assert (log_prob >= drawn - 1e-5).all()


@pytest.mark.parametrize("name", [name for name in HEADS if "conditional" not in name])
def test_an_action_of_the_environment_is_the_one_that_was_drawn(name: str) -> None:
    head = HEADS[name]()
    drawn: Any = head.draw(parameters(head).numpy(), np.random.default_rng(3))[0]
    if name == "gaussian":
        drawn = np.clip(drawn, -1, 1)  # what is clipped on its way cannot be known
    again: Any = head.from_environment(head.to_environment(drawn))
    assert again.dtype == drawn.dtype
    np.testing.assert_allclose(again, drawn, atol={"squashed": 1e-3, "gaussian": 1e-6}.get(name, 0))


@pytest.mark.parametrize(
    ("name", "action", "said"),
    [
        ("categorical", [3], r"action=\[3\]: must lie in -2..2"),
        ("categorical", [-3], r"must lie in -2..2"),
        ("multi-categorical", [[0, 4, 0]], "must lie in 0..3"),
        ("bernoulli", [[0, 1, 2, 0]], "bits are 0 or 1"),
        ("squashed", [[6.0, 0.0, 0.0]], "inside its bounds"),
        ("squashed", [[0.0, -2.0, 0.0]], "inside its bounds"),
        ("squashed", [[0.0, np.nan, 0.0]], "inside its bounds"),
    ],
)
def test_an_action_that_cannot_be_drawn_is_refused(name: str, action: Any, said: str) -> None:
    head = HEADS[name]()
    with pytest.raises(ValueError, match=said):
        head.from_environment(np.asarray(action, head.action_dtype))


@pytest.mark.parametrize("name", [name for name in HEADS if "categorical" not in name])
def test_only_discrete_actions_take_a_mask(name: str) -> None:
    head = HEADS[name]()
    with pytest.raises(ValueError, match="only a choice of one of n takes an action mask"):
        head.masked(parameters(head).numpy(), np.ones((ROWS, head.size), bool))


def test_categorical_samples_follow_their_probabilities() -> None:
    head = Categorical("action", Discrete(3))
    logits = np.log(np.array([[0.2, 0.5, 0.3]], np.float32)).repeat(100_000, 0)
    action, _ = head.draw(logits, np.random.default_rng(0))
    np.testing.assert_allclose(np.bincount(action) / len(action), [0.2, 0.5, 0.3], atol=0.01)


@pytest.mark.parametrize("forbidden", [[], [0, 3]])
def test_a_single_row_is_sampled_like_one_of_many(forbidden: list[int]) -> None:
    head, logits = Categorical("action", Discrete(5)), np.random.default_rng(1).normal(size=(300, 5)) * 4
    logits[:, forbidden] = -np.inf
    expected = torch.log_softmax(torch.from_numpy(logits), -1).numpy()
    for seed, row in enumerate(logits.astype(np.float32)):
        drawn, log_prob = head.draw(row[None], np.random.default_rng(seed))
        noise = np.random.default_rng(seed).standard_exponential((1, 5), dtype=np.float32)
        assert drawn.tolist() == (row - np.log(noise)).argmax(-1).tolist()
        assert (drawn.dtype.name, log_prob.dtype.name) == ("int64", "float32")
        np.testing.assert_allclose(log_prob, expected[seed, drawn], atol=1e-6)


def test_the_environment_gets_actions_within_bounds() -> None:
    assert Categorical("action", Discrete(3, 5)).to_environment(np.array([0, 2])).tolist() == [5, 7]
    far = np.array([[-9.0, 0.0, 9.0]], np.float32)
    assert Gaussian("action", WIDE, 0.0).to_environment(far).tolist() == [[-2.0, 2.0, 6.0]]
    stretched = SquashedGaussian("action", WIDE, 0.0).to_environment(far)
    np.testing.assert_allclose(stretched.astype(np.float64), [[-2.0, 2.0, 6.0]], atol=1e-5)
    assert stretched.dtype == np.float32


@pytest.mark.parametrize(
    ("leaf", "continuous", "message"),
    [
        (Box(np.zeros(2, np.int32), np.ones(2, np.int32)), "clipped", "Discrete or MultiDiscrete"),
        (box(0), "clipped", "at least one float"),
        (box(2, high=np.inf), "squashed", "set policy.continuous=clipped"),
    ],
)
def test_a_space_that_cannot_be_drawn_from_is_refused(leaf: Leaf, continuous: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"'action/0'.*Box.*{message}"):
        head_of("action/0", leaf, PolicySection.model_validate({"continuous": continuous}))


VALUES = np.array([[1.0, 5.0, 2.0, -3.0]], np.float32)


def head(epsilon: float, spread: float = 0.0, place: ExplorationSlots | None = None) -> EpsilonGreedy:
    made = EpsilonGreedy("action", Discrete(4))
    made.explore({"epsilon": epsilon, "epsilon_spread": spread}, place or ExplorationSlots())
    return made


def q_policy(**section: Any) -> Policy:
    wanted = DQNSection().policy_section(PolicySection(**({"hidden_sizes": (16,)} | section)))
    return build(box(4), Discrete(3), wanted, 0)


def test_epsilon_greedy_actions_come_with_their_probability() -> None:
    made = head(0.4)
    action, log_prob = made.draw(VALUES.repeat(50_000, 0), np.random.default_rng(0))
    expected = np.array([0.1, 0.7, 0.1, 0.1])
    np.testing.assert_allclose(np.bincount(action, minlength=4) / len(action), expected, atol=0.01)
    np.testing.assert_allclose(np.exp(log_prob), expected[action], atol=1e-6)
    np.testing.assert_allclose(
        np.exp(made.chance(VALUES.repeat(50_000, 0), action)), expected[action], atol=1e-6
    )
    np.testing.assert_allclose(made.describe(VALUES)["probability"], [expected], atol=1e-6)


@pytest.mark.parametrize("temperature", [0.5, 4.0])
def test_softmax_sampling_follows_the_action_values(temperature: float) -> None:
    made = EpsilonGreedy("action", Discrete(4))
    made.explore({"epsilon": 1.0, "temperature": temperature}, ExplorationSlots())
    weights = np.exp((VALUES[0] - 5.0) / temperature)
    expected = weights / weights.sum()
    action, log_prob = made.draw(VALUES.repeat(50_000, 0), np.random.default_rng(0))
    np.testing.assert_allclose(np.bincount(action, minlength=4) / len(action), expected, atol=0.01)
    np.testing.assert_allclose(np.exp(log_prob), expected[action], rtol=1e-4)
    np.testing.assert_allclose(made.describe(VALUES)["probability"], [expected], rtol=1e-4)
    every = np.arange(4)
    np.testing.assert_allclose(np.exp(made.chance(VALUES.repeat(4, 0), every)), expected, rtol=1e-4)
    assert made.mode(VALUES)[0] == [1]
    greedy = head(0.0)
    assert (made.chooses_by_value, greedy.chooses_by_value) == (False, True)


def test_each_environment_of_the_run_explores_as_in_ape_x() -> None:
    explorer = head(0.4, 7.0, ExplorationSlots(first=4, of=12))
    np.testing.assert_allclose(explorer.rates(4), [0.4 ** (1 + 7 * i / 11) for i in range(4, 8)], rtol=1e-5)
    assert head(0.4, 7.0, ExplorationSlots(first=0, of=1)).rates(1) == pytest.approx(0.4)
    beyond_the_last = head(0.4, 7.0, ExplorationSlots(first=2, of=3)).rates(3)
    np.testing.assert_allclose(beyond_the_last, [0.4**8] * 3, rtol=1e-5)
    np.testing.assert_allclose(head(0.4, 7.0).rates(3), [0.4] * 3, rtol=1e-5)
    explorer.explore({}, ExplorationSlots())
    assert explorer.rates(2).tolist() == [0.0, 0.0]
    action, log_prob = explorer.draw(VALUES.repeat(100, 0), np.random.default_rng(0))
    assert set(action.tolist()) == {1}
    np.testing.assert_allclose(log_prob, 0.0, atol=1e-6)


def test_masked_actions_are_never_drawn() -> None:
    made = head(0.5)
    allowed = np.array([[True, False, True, True]])
    masked = made.masked(VALUES, allowed).repeat(30_000, 0)
    action, log_prob = made.draw(masked, np.random.default_rng(0))
    expected = np.array([0.5 / 3, 0.0, 0.5 + 0.5 / 3, 0.5 / 3])
    np.testing.assert_allclose(np.bincount(action, minlength=4) / len(action), expected, atol=0.015)
    np.testing.assert_allclose(np.exp(log_prob), expected[action], atol=1e-6)


def test_the_probe_depends_on_every_value_at_any_epsilon() -> None:
    policy = q_policy()
    observation = {"observation": np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)}
    action = policy.act(observation, deterministic=True).action
    before = policy.acting_log_prob(observation, action)
    policy.explore({"epsilon": 0.7}, ExplorationSlots())
    assert np.array_equal(policy.acting_log_prob(observation, action), before)
    np.testing.assert_allclose(policy.log_prob(observation, action), before, atol=1e-6)
    with torch.no_grad():
        policy.actor_head.weight[0, 0] += 0.5
    assert not np.allclose(policy.acting_log_prob(observation, action), before, atol=1e-3)
    with torch.no_grad():
        policy.actor_head.weight.mul_(1e6)
    np.testing.assert_allclose(
        policy.acting_log_prob(observation, action), policy.log_prob(observation, action), atol=1e-5
    )


@pytest.mark.parametrize("section", [{}, {"dueling": True}, {"dueling": True, "shared_trunk": True}])
def test_a_q_policy_acts_by_the_values_that_it_learns(section: dict[str, Any]) -> None:
    policy = q_policy(**section)
    assert isinstance(policy, QPolicy)
    torch.nn.init.normal_(policy.actor_head.weight, std=0.5, generator=torch.Generator().manual_seed(0))
    observation = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    seen = {"observation": torch.from_numpy(observation)}
    outputs = policy.outputs(policy.read(seen))
    acted = policy.act({"observation": observation}, deterministic=True).action["action"]
    assert acted.tolist() == outputs.parameters.argmax(1).tolist()
    torch.testing.assert_close(policy.value(seen), outputs.parameters.amax(1))
    np.testing.assert_allclose(policy.values({"observation": observation}), outputs.value.detach(), atol=1e-6)


def test_dueling_values_are_a_value_and_advantages_without_their_mean() -> None:
    policy = q_policy(dueling=True)
    seen = {"observation": torch.randn(8, 4)}
    inputs = policy.read(seen)
    assert policy.critic_body is not None
    value = policy.critic_head(policy.critic_body(inputs)).squeeze(1)
    torch.testing.assert_close(policy.outputs(inputs).parameters.mean(1), value)


def made(action: Space) -> tuple[Policy, dict[str, Any]]:
    policy = build(box(4), action, PolicySection(hidden_sizes=(8,)), 0).double()
    with torch.no_grad():
        policy.actor_head.weight.mul_(500)
    random = np.random.default_rng(1)
    row: dict[str, Any] = {"observation": random.standard_normal((ROWS, 4)).astype(np.float32)}
    for rule in mask_rules(action):
        mask = random.random((ROWS, *rule.shape)) < 0.5
        mask[:, ::2] |= ~mask.any(1, keepdims=True)
        row[rule.name] = mask
    return policy, row


def tensors(row: dict[str, Any]) -> dict[str, Tensor]:
    return {path: torch.from_numpy(array) for path, array in row.items()}


def test_a_forbidden_action_is_never_drawn_and_has_probability_zero() -> None:
    policy, row = made(Discrete(5))
    outputs = policy.outputs(policy.read(tensors(row)))
    shares = torch.softmax(outputs.parameters, -1)
    mask = torch.from_numpy(row["mask/action"])
    assert (shares[~mask] == 0).all()
    torch.testing.assert_close(shares.sum(1), torch.ones(ROWS, dtype=torch.float64))
    for _ in range(50):
        acted = policy.act(row)
        assert row["mask/action"][np.arange(ROWS), acted.action["action"]].all()
    best = policy.act(row, deterministic=True).action["action"]
    np.testing.assert_array_equal(best, shares.argmax(1).numpy())


@pytest.mark.parametrize(
    "action",
    [Discrete(5), MultiDiscrete((3, 4)), Tuple((Discrete(3), box(2)))],
    ids=["one", "several", "hybrid"],
)
def test_actor_and_learner_agree_on_the_log_probability(action: Space) -> None:
    policy, row = made(action)
    if isinstance(action, MultiDiscrete):
        row["mask/action"][:, [0, 3]] = True
    acted = policy.act(row)
    np.testing.assert_allclose(policy.log_prob(row, acted.action), acted.log_prob, atol=1e-5)
    np.testing.assert_allclose(policy.acting_log_prob(row, acted.action), acted.log_prob, atol=1e-5)
    free = {"observation": row["observation"]}
    assert not np.allclose(policy.log_prob(free, acted.action), acted.log_prob, atol=1e-2)


def test_the_entropy_is_that_of_the_allowed_actions() -> None:
    policy, row = made(Discrete(5))
    row["mask/action"][0] = [False, True, False, False, False]
    parameters = policy.outputs(policy.read(tensors(row))).parameters
    found = policy.joint_entropy(parameters)
    for n, mask in enumerate(torch.from_numpy(row["mask/action"])):
        expected = torch.distributions.Categorical(logits=parameters[n][mask]).entropy()
        torch.testing.assert_close(found[n], expected, atol=1e-9, rtol=1e-9)
    assert found[0] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_stay_finite_and_forbidden_logits_have_none(dtype: torch.dtype) -> None:
    head = build(box(4), Discrete(4), PolicySection(), 0)
    logits = torch.tensor([[1e4, -1e4, 3.0, 0.0], [0.0, 80.0, -80.0, 1.0]], dtype=dtype, requires_grad=True)
    forbidden = torch.tensor([[False, True, False, True], [True, False, True, True]])
    hidden = masked(logits, forbidden)
    log_prob = head.joint_log_prob(hidden, {"action": torch.tensor([2, 1])})
    entropy = head.joint_entropy(hidden)
    assert torch.isfinite(log_prob).all()
    assert torch.isfinite(entropy).all()
    (log_prob.sum() + entropy.sum()).backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert (logits.grad[forbidden] == 0).all()


def test_acting_where_nothing_is_allowed_names_the_row() -> None:
    policy, row = made(Discrete(5))
    row["mask/action"][7] = False
    with pytest.raises(ValueError, match="mask of row 7 allows nothing"):
        policy.act(row)


def test_the_learner_rebuilds_the_stacks_that_gymnasium_makes() -> None:
    policy = remembering(frame_stack=3)
    actor = Actor(policy, slots=2, seed=5)
    batches = [batch_of([actor.fragment(steps)]) for steps in (8, 3, 8, 5)]
    for slot in range(2):
        stacked: Any = FrameStackObservation(Wandering(6), 3)
        expected = np.ravel(stacked.reset(seed=5 + slot)[0])
        for batch in batches:
            look = see(policy, batch)
            finals = {
                (int(t), int(b)): k
                for k, (t, b) in enumerate(zip(batch.final_step, batch.final_slot, strict=True))
            }
            for t in range(len(batch.valid)):
                np.testing.assert_array_equal(look.observation["observation"][t, slot], expected)
                observation, _, over, cut, _ = stacked.step(int(batch.action["action"][t, slot]))
                if over or cut:
                    assert look.lasts is not None
                    np.testing.assert_array_equal(look.lasts.vector[finals[t, slot]], np.ravel(observation))
                    observation = stacked.reset()[0]
                expected = np.ravel(observation)


SPACES: dict[str, tuple[Space, Space]] = {
    "vector": (box(4), box(12)),
    "matrix of floats": (box(2, 3), box(18)),
    "number": (Box(np.full((), -1, np.float32), np.full((), 1, np.float32)), box(3)),
    "picture": (image(10, 12), image(3, 10, 12)),
    "colours last": (image(12, 10, 3), image(12, 10, 9)),
    "colours first": (image(3, 12, 10), image(9, 12, 10)),
    "choice": (Discrete(5, start=2), MultiDiscrete((5, 5, 5))),
    "choices": (MultiDiscrete((2, 3)), MultiDiscrete((2, 3, 2, 3, 2, 3))),
    "bits": (MultiBinary(4), MultiBinary(12)),
    "parts": (
        Dict((("camera", image(10, 12)), ("speed", box(2)))),
        Dict((("camera", image(3, 10, 12)), ("speed", box(6)))),
    ),
}


@pytest.mark.parametrize(("single", "expected"), SPACES.values(), ids=SPACES)
def test_the_network_reads_a_stack_as_documented(single: Space, expected: Space) -> None:
    frames = FrameStack(single, 3)
    assert frames.space == expected
    row = {path: np.zeros((2, *leaf.shape), leaf.dtype) for path, leaf in leaves(single, "observation")}
    if isinstance(single, Discrete):
        row["observation"] += 2
    seen, state = frames.push(row)
    for path, leaf in leaves(expected, "observation"):
        assert seen[path].shape == (2, *leaf.shape)
    assert {name: array.shape[1:] for name, array in state.items()} == {
        f"state/{name}": leaf.shape for name, leaf in frames.state
    }


@pytest.mark.parametrize("shape", [(6, 8, 3), (3, 6, 8)])
def test_channels_of_a_stack_are_frames_oldest_first(shape: tuple[int, ...]) -> None:
    frames = FrameStack(image(*shape), 2)
    first, second = (np.random.default_rng(k).integers(0, 256, (1, *shape), np.uint8) for k in range(2))
    _, state = frames.push({"observation": first})
    seen, _ = frames.push({"observation": second} | state)
    axis = 3 if shape[-1] == 3 else 1
    np.testing.assert_array_equal(seen["observation"], np.concatenate([first, second], axis))


def test_a_stack_that_hides_its_channels_is_refused() -> None:
    with pytest.raises(ValueError, match=r"policy\.frame_stack=4: observation .*stack fewer frames"):
        FrameStack(image(10, 10, 4), 4)


def test_a_frame_is_sent_once() -> None:
    depth, steps, slots = 4, 32, 8
    single, pictures = (fragment_schema(image(*shape), Discrete(2)) for shape in ((84, 84), (84, 84, depth)))
    policy_state = Dict(FrameStack(image(84, 84), depth).state)
    ours = fragment_schema(image(84, 84), Discrete(2), state_rules(policy_state))
    rest = single.fragment_bytes(steps, slots, 0) - (steps + 1) * slots * 84 * 84
    state = slots * ((depth - 1) * 84 * 84 + 1) + (steps + 1) * slots
    assert (
        ours.fragment_bytes(steps, slots, 0)
        <= (pictures.fragment_bytes(steps, slots, 0) - rest) / depth + rest + state
    )
    assert ours.fragment_bytes(steps, slots, 0) < 0.3 * pictures.fragment_bytes(steps, slots, 0)
