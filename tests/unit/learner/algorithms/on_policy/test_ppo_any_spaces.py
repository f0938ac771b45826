"""Every kind of observation and action, from an environment's step to an update."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from penstock.config.settings import PolicySection, PPOSection
from penstock.learner.algorithms.gradient import DenseNetwork, Network
from penstock.learner.algorithms.ppo import PPO
from penstock.learner.batch import Batch
from penstock.policy.policy import Policy
from tests.support.experience.any_spaces import FRAGMENTS, SLOTS, STEPS, Acting, AnySpace

OBSERVATIONS: dict[str, AnySpace] = {
    "vector": spaces.Box(-2, 2, (3,), np.float32),
    "float64 matrix": spaces.Box(-2, 2, (2, 3), np.float64),
    "bytes": spaces.Box(0, 255, (5,), np.uint8),
    "image": spaces.Box(0, 255, (8, 8, 3), np.uint8),
    "choice": spaces.Discrete(4, start=-1),
    "choices": spaces.MultiDiscrete([3, 2]),
    "bits": spaces.MultiBinary(4),
    "dict": spaces.Dict(
        camera=spaces.Box(0, 255, (9, 8), np.uint8),
        behind=spaces.Box(0, 255, (3, 8, 8), np.uint8),
        arm=spaces.Box(-5, 5, (2,), np.float32),
        gear=spaces.Discrete(3),
        lamps=spaces.MultiBinary(2),
    ),
    "tuple": spaces.Tuple((spaces.Box(-1, 1, (), np.float32), spaces.MultiDiscrete([2, 2]))),
    "nested": spaces.Dict(
        inner=spaces.Tuple((spaces.Discrete(2), spaces.Dict(deep=spaces.Box(-1, 1, (2,), np.float32))))
    ),
}
ACTIONS: dict[str, AnySpace] = {
    "discrete": spaces.Discrete(3),
    "discrete from 2": spaces.Discrete(3, start=2),
    "multi-discrete": spaces.MultiDiscrete([2, 3]),
    "multi-binary": spaces.MultiBinary(3),
    "box": spaces.Box(-0.5, 2.0, (2,), np.float32),
    "float64 box": spaces.Box(-1.0, 1.0, (2, 2), np.float64),
    "hybrid tuple": spaces.Tuple(
        (spaces.Discrete(3), spaces.Box(-1, 1, (2,), np.float32), spaces.MultiBinary(2))
    ),
    "dict": spaces.Dict(
        turn=spaces.Box(-1, 1, (1,), np.float32),
        press=spaces.Tuple((spaces.MultiDiscrete([2, 4]), spaces.Discrete(2, start=1))),
    ),
}
SMALL = {"hidden_sizes": (16,)}


def check_update(acting: Acting) -> Batch:
    """One update: log-probabilities agree before it, every parameter has a gradient and moves by it."""
    batch, policy = acting.batch(), acting.policy
    count = STEPS * SLOTS * FRAGMENTS
    assert int(batch.valid.sum()) == count
    observed = {path: rows[:-1].flatten(0, 1).numpy() for path, rows in batch.observation.items()}
    action = {path: rows.flatten(0, 1).numpy() for path, rows in batch.action.items()}
    np.testing.assert_allclose(policy.log_prob(observed, action), batch.log_prob.flatten(), atol=5e-5)
    before = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
    ppo = PPO(policy, PPOSection(epochs=1, minibatches=2, entropy_coefficient=0.01), seed=0)
    update = ppo.update(batch, progress=0.0)
    assert (update.applied, update.steps) == (True, count)
    assert update.metrics["kl_behaviour"] < 0.1
    still = [name for name, parameter in policy.named_parameters() if torch.equal(parameter, before[name])]
    assert still == []
    return batch


def check_slopes(policy: Policy, batch: Batch) -> None:
    """An update of a dense policy in closed form is the one that autograd makes."""
    updated = []
    for is_closed in (True, False):
        learned = copy.deepcopy(policy)
        section = PPOSection(
            epochs=2, minibatches=2, entropy_coefficient=0.01, dual_clip=2.0, value_clip=0.1, clip_range=0.05
        )
        ppo = PPO(learned, section, seed=0)
        assert isinstance(ppo._network, DenseNetwork)
        assert ppo._network.is_closed
        if not is_closed:
            ppo._network = Network(learned, ppo._optimiser)
        assert ppo.update(batch, progress=0.0).applied
        updated.append(torch.cat([parameter.detach().flatten() for parameter in learned.parameters()]))
    torch.testing.assert_close(*updated, rtol=1e-9, atol=1e-12)


SLOPED: dict[str, AnySpace] = {
    "one choice": spaces.Discrete(3),
    "two choices": spaces.Tuple((spaces.Discrete(3), spaces.Discrete(2, start=1))),
    "choices and reals": spaces.Tuple((spaces.MultiDiscrete([2, 3]), spaces.Box(-1, 1, (2,), np.float32))),
}


@pytest.mark.parametrize("section", [{}, {"shared_trunk": True}])
@pytest.mark.parametrize("action", SLOPED.values(), ids=SLOPED)
def test_slopes_in_closed_form_make_the_update_that_autograd_makes(
    action: AnySpace, section: dict[str, Any]
) -> None:
    acting = Acting(OBSERVATIONS["vector"], action, PolicySection.model_validate({**SMALL, **section}))
    batch = acting.batch()
    acting.policy.double()
    check_slopes(acting.policy, batch)


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_every_observation_is_learned_from(name: str) -> None:
    section = PolicySection.model_validate({"normalise_observations": True} | SMALL)
    acting = Acting(OBSERVATIONS[name], spaces.Discrete(2), section)
    batch, normaliser = check_update(acting), acting.policy.normaliser
    rows = acting.policy.reader.reals
    assert (normaliser is None) == (not rows)
    if normaliser is not None:
        steps = batch.valid.numel()
        observed = {path: values[:-1] for path, values in batch.observation.items()}
        reals = np.concatenate(
            [
                observed[path].double().numpy().reshape(steps, -1) / (255 if leaf.dtype == "uint8" else 1)
                for path, leaf in rows
            ],
            1,
        )
        np.testing.assert_allclose(normaliser.mean, reals.mean(0), rtol=1e-6)
        np.testing.assert_allclose(normaliser.variance, reals.var(0), rtol=1e-6)
        # The next batch is acted, and learned from, with these statistics.
        check_update(acting)


@pytest.mark.parametrize("name", ACTIONS)
def test_every_action_is_learned(name: str) -> None:
    acting = Acting(spaces.Box(-1, 1, (3,), np.float32), ACTIONS[name], PolicySection.model_validate(SMALL))
    check_update(acting)


@pytest.mark.parametrize("name", ["box", "float64 box", "hybrid tuple", "dict"])
def test_squashed_actions_stay_inside_their_bounds(name: str) -> None:
    section = PolicySection.model_validate(SMALL | {"continuous": "squashed", "initial_log_std": 1.0})
    check_update(Acting(spaces.Box(-1, 1, (3,), np.float32), ACTIONS[name], section))


@pytest.mark.parametrize(
    "section",
    [
        {"image_trunk": "small", "hidden_norm": "layer"},
        {"image_trunk": "small", "shared_trunk": True, "dropout": 0.2},
        {"image_trunk": "impala", "hidden_norm": "batch", "dropout": 0.2},
        {"image_trunk": "impala", "hidden_norm": "batch", "shared_trunk": True},
    ],
)
def test_parts_of_every_kind_on_both_sides(section: dict[str, object]) -> None:
    told = PolicySection.model_validate(SMALL | {"normalise_observations": True} | section)
    check_update(Acting(OBSERVATIONS["dict"], ACTIONS["hybrid tuple"], told))
