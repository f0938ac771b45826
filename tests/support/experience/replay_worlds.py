"""Small worlds with known optima, as batches of fragments that a learner would read from the log."""

from typing import Any

import numpy as np
import torch

from penstock.config.settings import DQNSection, PolicySection, SACSection
from penstock.learner.algorithms.off_policy.memory import Steps, Transitions
from penstock.learner.batch import Batch, assemble
from penstock.policy.policy import Policy, build
from penstock.policy.recurrent import FrameStack
from penstock.protocol.fragment import FragmentHeader, WeightSpan
from penstock.protocol.spaces import Box, Discrete
from penstock.protocol.tensor import Array
from tests.support.experience.experience import box, header_of

CPU = torch.device("cpu")
STATES = 4


def q_policy(section: DQNSection, states: int = STATES, *, seed: int = 0, **policy: Any) -> Policy:
    wanted = section.policy_section(PolicySection(**({"hidden_sizes": (32,), "activation": "relu"} | policy)))
    return build(box(states), Discrete(2), wanted, seed)


def soft_policy(section: SACSection, *, seed: int = 0, action: Box | None = None, **policy: Any) -> Policy:
    wanted = section.policy_section(PolicySection(**({"hidden_sizes": (32,), "activation": "relu"} | policy)))
    return build(box(2), action or box(1), wanted, seed)


def header(steps: int, slots: int) -> FragmentHeader:
    """The digest of a fragment that no reader checks."""
    return header_of(1, 1, steps, slots, WeightSpan(0, 0, steps, 1, 0))


def read(steps: Steps, stack: FrameStack) -> Transitions:
    """Transitions of a fragment as a policy reads them, without a replay memory."""
    before, after = (
        {path: frames[rows] for path, frames in steps.frames.items()} for rows in (steps.before, steps.after)
    )
    return Transitions(stack.row(before), steps.action, steps.reward, steps.discount, stack.row(after))


def corridor(number: int, *, steps: int = 8, slots: int = 4) -> Batch:
    """States 0..3 in a row, walked at random; action 1 goes right, 0 left.

    Entering the end pays 1 and terminates.

    With γ the optimal values are Q(s, right) = γ^(3−1−s) for s = 0..2 and Q(s, left) = γ · max_a Q(max(s−1,
    0), a).
    """
    random = np.random.default_rng(number)
    at = random.integers(0, STATES - 1, slots)
    observations, actions, rewards, ended = [np.eye(STATES)[at]], [], [], []
    finals: list[tuple[int, int]] = []
    for step in range(steps):
        action = random.integers(0, 2, slots)
        at = np.where(action == 1, at + 1, np.maximum(at - 1, 0))
        done = at == STATES - 1
        finals += [(slot, step) for slot in np.flatnonzero(done).tolist()]
        actions.append(action)
        rewards.append(done.astype(np.float32))
        ended.append(done)
        at = np.where(done, random.integers(0, STATES - 1, slots), at)
        observations.append(np.eye(STATES)[at])
    end = np.eye(STATES, dtype=np.float32)[STATES - 1]
    arrays: dict[str, Array] = {
        "observation": np.stack(observations).astype(np.float32),
        "action": np.stack(actions).astype(np.int64),
        "reward": np.stack(rewards),
        "log_prob": np.full((steps, slots), np.log(0.5), np.float32),
        "terminated": np.stack(ended),
        "truncated": np.zeros((steps, slots), bool),
        "valid": np.ones((steps, slots), bool),
        "final/slot": np.array([slot for slot, _ in finals], np.int32),
        "final/step": np.array([step for _, step in finals], np.int32),
        "final/observation": np.tile(end, (len(finals), 1)),
    }
    return assemble([(header(steps, slots), arrays)], CPU, [(number, 1000)])


def corridor_values(discount: float) -> np.ndarray[Any, Any]:
    right = np.array([discount ** (STATES - 2 - state) for state in range(STATES - 1)])
    left = discount * np.maximum(right[[0, 0, 1]], 0.0)
    return np.stack([left, right], 1)


def one_shot(policy: Policy, number: int, best: float, *, steps: int = 16, slots: int = 4) -> Batch:
    """Every step is an episode.

    Its reward is −(a − best)² for the action a = tanh of what the policy drew.
    """
    random = np.random.default_rng(number)
    observation = random.uniform(-1, 1, (steps + 1, slots, 2)).astype(np.float32)
    acted = policy.act({"observation": observation[:-1].reshape(-1, 2)})
    raw = acted.action["action"].reshape(steps, slots, 1)
    places = np.indices((steps, slots)).reshape(2, -1)
    arrays: dict[str, Array] = {
        "observation": observation,
        "action": raw,
        "reward": -np.square(np.tanh(raw[..., 0]) - best),
        "log_prob": acted.log_prob.reshape(steps, slots),
        "terminated": np.ones((steps, slots), bool),
        "truncated": np.zeros((steps, slots), bool),
        "valid": np.ones((steps, slots), bool),
        "final/slot": places[1].astype(np.int32),
        "final/step": places[0].astype(np.int32),
        "final/observation": observation[:-1].reshape(-1, 2),
    }
    return assemble([(header(steps, slots), arrays)], CPU, [(number, 1000)])


Ends = dict[tuple[int, int], str]
"""(step, slot) → "terminated" or "truncated"."""


def fragment(
    steps: int,
    slots: int,
    *,
    ends: Ends | None = None,
    invalid: tuple[tuple[int, int], ...] = (),
    first: int = 0,
) -> tuple[FragmentHeader, dict[str, Array]]:
    """The observation x of row t and slot i is first + 100·i + t.

    Its reward is 1 + x, and a true final observation is −(1 + x).
    """
    ends = ends or {}
    rows = first + np.arange(steps + 1)[:, None] + 100.0 * np.arange(slots)[None, :]
    flags = {how: np.zeros((steps, slots), bool) for how in ("terminated", "truncated")}
    for (step, slot), how in ends.items():
        flags[how][step, slot] = True
    valid = np.ones((steps, slots), bool)
    for step, slot in invalid:
        valid[step, slot] = False
    order = sorted(ends)
    finals = np.array([-(rows[step, slot] + 1) for step, slot in order], np.float32).reshape(-1, 1)
    arrays: dict[str, Array] = {
        "observation": rows[..., None].astype(np.float32),
        "action": (np.arange(steps * slots).reshape(steps, slots) % 2).astype(np.int64),
        "reward": (1.0 + rows[:-1]).astype(np.float32),
        "log_prob": np.zeros((steps, slots), np.float32),
        **flags,
        "valid": valid,
        "final/slot": np.array([slot for _, slot in order], np.int32),
        "final/step": np.array([step for step, _ in order], np.int32),
        "final/observation": finals,
    }
    return header(steps, slots), arrays


def batch(*parts: tuple[FragmentHeader, dict[str, Array]], first_number: int = 1, size: int = 10) -> Batch:
    numbers = [(first_number + index, size) for index in range(len(parts))]
    return assemble(parts, torch.device("cpu"), numbers)
