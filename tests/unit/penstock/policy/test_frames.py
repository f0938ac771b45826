"""Stacks that the policy makes of single frames, against Gymnasium's own."""

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.wrappers import FrameStackObservation

from penstock.learner.algorithms.rows import see
from penstock.policy.acting.acting_policy import begun
from penstock.policy.recurrent import FrameStack
from penstock.protocol.schema import fragment_schema, state_rules
from penstock.protocol.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, leaves
from tests.support.experience.experience import box
from tests.support.experience.remembering import OBSERVATION, Actor, Wandering, batch_of, remembering


def image(*shape: int) -> Box:
    """A uint8 Box."""
    return Box(np.zeros(shape, np.uint8), np.full(shape, 255, np.uint8))


@pytest.mark.parametrize("depth", [2, 4])
def test_stacks_are_those_of_gymnasium_over_episodes(depth: int) -> None:
    plain: Any = Wandering(6)
    stacked: Any = FrameStackObservation(Wandering(6), depth)
    frames = FrameStack(OBSERVATION, depth)
    expected, _ = stacked.reset(seed=3)
    observation, _ = plain.reset(seed=3)
    state = {f"state/{name}": np.zeros((1, *leaf.shape), leaf.dtype) for name, leaf in frames.state}
    for _ in range(40):
        seen, after = frames.push({"observation": observation[np.newaxis]} | state)
        np.testing.assert_array_equal(seen["observation"][0], np.ravel(expected))
        expected, _, over, cut, _ = stacked.step(0)
        observation = plain.step(0)[0]
        if over or cut:
            expected, observation = stacked.reset()[0], plain.reset()[0]
        state = begun(after, np.array([over or cut]))


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
def test_what_the_network_reads_of_a_stack(single: Space, expected: Space) -> None:
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


def test_a_frame_travels_once() -> None:
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


@torch.no_grad()
def test_a_stack_is_all_that_the_network_sees() -> None:
    policy = remembering(frame_stack=2)
    row: dict[str, Any] = {"observation": np.ones((4, 3), np.float32)} | policy.initial_state(4)
    row = {"observation": np.full((4, 3), 2, np.float32)} | dict(policy.act(row).state)
    stacked = torch.cat([torch.ones(4, 3), torch.full((4, 3), 2.0)], 1)
    expected = policy.actor_head(
        policy.actor_body(policy.reader.read({"observation": stacked}, torch.float32))
    )
    np.testing.assert_allclose(policy.step(row).parameters, expected.numpy(), rtol=1e-5)


def test_gymnasium_is_what_we_follow() -> None:
    stacked: Any = FrameStackObservation(gymnasium.make("CartPole-v1"), 3)
    first, _ = stacked.reset(seed=0)
    assert (first == first[0]).all()
