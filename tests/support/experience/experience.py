"""Experience for tests of policy and learner: small environments, a plain collector, synthetic batches."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import gymnasium
import numpy as np
import torch

from penstock.config.settings import PolicySection
from penstock.learner.algorithms.algorithm import AlgorithmState
from penstock.learner.batch import Batch, assemble
from penstock.policy.policy import Policy, build
from penstock.protocol.fragment import FragmentHeader, Slot, WeightSpan
from penstock.protocol.spaces import Box, Discrete, Space
from penstock.protocol.tensor import Array

Fragment = tuple[FragmentHeader, dict[str, Array]]


def box(*shape: int, low: float = -1.0, high: float = 1.0) -> Box:
    """A float32 Box."""
    return Box(np.full(shape, low, np.float32), np.full(shape, high, np.float32))


def small_policy(seed: int = 0, action: Space | None = None, **section: Any) -> Policy:
    """Four numbers to two actions, 16 hidden units."""
    settings = PolicySection(**({"hidden_sizes": (16, 16)} | section))
    return build(box(4), action or Discrete(2), settings, seed)


class Environment(Protocol):
    """The part of gymnasium.Env that the collector uses."""

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        ...

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """One step."""
        ...


class Line:
    """Always observes 0 and rewards 1; every episode ends with step `length`, as `how` says."""

    def __init__(self, length: int, how: str) -> None:
        self._length, self._how = length, how
        self._step = 0

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Back to step 0."""
        self._step = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """One step on, whatever the action."""
        self._step += 1
        ends = self._step == self._length
        return self._observe(), 1.0, ends and self._how == "terminated", ends and self._how == "truncated", {}

    def _observe(self) -> Array:
        # A terminating line shows how far it is; a truncating one looks the same everywhere.
        position = self._step / self._length if self._how == "terminated" else 0.0
        return np.array([position, 1.0, 0.0, 0.0], np.float32)


class Collector:
    """Steps environments with a policy and cuts fragments [T, N] with same-step resets."""

    def __init__(self, environments: Sequence[Environment], session: int = 1) -> None:
        self._environments = environments
        self._session = session
        self._sequence = 0
        self._observation = np.stack([env.reset(seed=i)[0] for i, env in enumerate(environments)])

    def fragment(self, policy: Policy, steps: int, update: int = 0) -> Fragment:
        """The next fragment of T = `steps`."""
        count = len(self._environments)
        observations, rows = [self._observation], []
        finals: list[tuple[int, int, Array]] = []
        for t in range(steps):
            acted = policy.act({"observation": self._observation})
            results = [self._step(i, acted.action["action"][i], t, finals) for i in range(count)]
            self._observation = np.stack([result[0] for result in results])
            observations.append(self._observation)
            rows.append((acted.action["action"], acted.log_prob, [result[1:] for result in results]))
        arrays = self._arrays(observations, rows, finals)
        self._sequence += 1
        return _header(self._session, self._sequence, steps, count, update), arrays

    def _step(self, slot: int, action: Any, t: int, finals: list[tuple[int, int, Array]]) -> tuple[Any, ...]:
        observation, reward, terminated, truncated, _ = self._environments[slot].step(action)
        if terminated or truncated:
            finals.append((slot, t, observation))
            observation = self._environments[slot].reset()[0]
        return observation, reward, terminated, truncated

    def _arrays(
        self, observations: list[Array], rows: list[Any], finals: list[tuple[int, int, Array]]
    ) -> dict[str, Array]:
        outcome = np.array([row[2] for row in rows], np.float64)
        last = [final[2] for final in finals]
        return {
            "observation": np.stack(observations),
            "action": np.stack([row[0] for row in rows]),
            "log_prob": np.stack([row[1] for row in rows]),
            "reward": outcome[..., 0].astype(np.float32),
            "terminated": outcome[..., 1].astype(bool),
            "truncated": outcome[..., 2].astype(bool),
            "valid": np.ones(outcome.shape[:2], bool),
            "final/slot": np.array([final[0] for final in finals], np.int32),
            "final/step": np.array([final[1] for final in finals], np.int32),
            "final/observation": np.stack(last) if last else observations[0][:0],
        }


def _header(session: int, sequence: int, steps: int, slots: int, update: int) -> FragmentHeader:
    return FragmentHeader(
        run="run-a",
        session=session,
        sequence=sequence,
        schema_id="",
        steps=steps,
        slots=tuple(Slot(index, 0, 0) for index in range(slots)),
        weights=(WeightSpan(0, 0, steps, update, update),),
        tensors=(),
    )


def cartpoles(count: int, **kwargs: Any) -> list[Environment]:
    """Unwrapped by vectorisation: one environment each."""
    return [gymnasium.make("CartPole-v1", **kwargs) for _ in range(count)]


def collect(
    policy: Policy, environments: Callable[[int], Sequence[Environment]] = cartpoles, *, steps: int = 16
) -> Batch:
    """One batch of four columns, in two fragments."""
    collectors = [Collector(environments(2), session) for session in (1, 2)]
    return assemble([collector.fragment(policy, steps) for collector in collectors], torch.device("cpu"))


def same(first: AlgorithmState, second: AlgorithmState) -> bool:
    """Whether two states are equal bit by bit."""
    tensors = first.tensors.keys() == second.tensors.keys() and all(
        torch.equal(tensor, second.tensors[name]) for name, tensor in first.tensors.items()
    )
    return tensors and first.numbers == second.numbers
