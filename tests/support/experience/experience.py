"""Experience for tests of policy and learner: small environments, a plain collector, synthetic batches."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from penstock.actor.acting.stepper import Stepper
from penstock.actor.rollout.generator import FragmentBuilder, HeaderFields
from penstock.config.settings import PolicySection
from penstock.learner.algorithms.algorithm import AlgorithmState
from penstock.learner.batch import Batch, assemble, check_meaning
from penstock.policy.policy import Policy, build
from penstock.protocol.fragment import Fragment as FragmentFragment
from penstock.protocol.fragment import FragmentHeader, Slot, WeightSpan, check
from penstock.protocol.messages import Publication
from penstock.protocol.schema import fragment_schema
from penstock.protocol.spaces import Box, Discrete, Space, leaves, sample
from penstock.protocol.tensor import Array
from penstock.workloads.control.environment import to_space

Fragment = tuple[FragmentHeader, dict[str, Array]]


def box(*shape: int, low: float = -1.0, high: float = 1.0) -> Box:
    return Box(np.full(shape, low, np.float32), np.full(shape, high, np.float32))


def image(*shape: int) -> Box:
    """A uint8 Box."""
    return Box(np.zeros(shape, np.uint8), np.full(shape, 255, np.uint8))


def observations(space: Space, rows: int) -> dict[str, Array]:
    """Values of every part of a space."""
    random = np.random.default_rng(0)
    return {path: sample(leaf, rows, random) for path, leaf in leaves(space, "observation")}


def small_policy(seed: int = 0, action: Space | None = None, **section: Any) -> Policy:
    settings = PolicySection(**({"hidden_sizes": (16, 16)} | section))
    return build(box(4), action or Discrete(2), settings, seed)


class Environment(Protocol):
    """The part of gymnasium.Env that the collector uses."""

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]: ...

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]: ...


class Line:
    """Always observes 0 and rewards 1; every episode ends with step `length`, as `how` says."""

    def __init__(self, length: int, how: str) -> None:
        self._length, self._how = length, how
        self._step = 0

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        self._step = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
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
        span = WeightSpan(0, 0, steps, update, update)
        return header_of(self._session, self._sequence, steps, count, span), arrays

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


def header_of(session: int, sequence: int, steps: int, slots: int, weights: WeightSpan) -> FragmentHeader:
    return FragmentHeader(
        run="run-a",
        session=session,
        sequence=sequence,
        schema_id="",
        steps=steps,
        slots=tuple(Slot(index, 0, 0) for index in range(slots)),
        weights=(weights,),
        tensors=(),
    )


def cartpoles(count: int, **kwargs: Any) -> list[Environment]:
    """Unwrapped by vectorisation: one environment each."""
    return [gymnasium.make("CartPole-v1", **kwargs) for _ in range(count)]


def collect(
    policy: Policy, environments: Callable[[int], Sequence[Environment]] = cartpoles, *, steps: int = 16
) -> Batch:
    collectors = [Collector(environments(2), session) for session in (1, 2)]
    return assemble([collector.fragment(policy, steps) for collector in collectors], torch.device("cpu"))


def same(first: AlgorithmState, second: AlgorithmState) -> bool:
    tensors = first.tensors.keys() == second.tensors.keys() and all(
        torch.equal(tensor, second.tensors[name]) for name, tensor in first.tensors.items()
    )
    return tensors and first.numbers == second.numbers


SLOTS, STEPS, FRAGMENTS = 3, 8, 2
AnySpace = spaces.Space[Any]


class Sampling(gymnasium.Env[Any, Any]):
    """Observes samples of its space; episodes of five steps, every other one truncated.

    Rewards 1 and 0 in turn.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - Gymnasium declares it so

    def __init__(self, observation: AnySpace, action: AnySpace) -> None:
        self.observation_space, self.action_space = copy.deepcopy(observation), copy.deepcopy(action)
        self._step = self._episode = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """The next episode; a seed decides the samples."""
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self._step, self._episode = 0, self._episode + 1
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Raises AssertionError for an action that is not one of its space."""
        assert self.action_space.contains(action), f"{action!r} is not one of {self.action_space}"
        self._step += 1
        is_over, is_odd = self._step == 5, self._episode % 2 == 1
        seen = self.observation_space.sample()
        return seen, float(self._step % 2), is_over and not is_odd, is_over and is_odd, {}


class Acting:
    """A policy for these spaces, and an actor that samples with it."""

    def __init__(
        self, observation: AnySpace, action: AnySpace, section: PolicySection, seed: int = 0
    ) -> None:
        seen, done = to_space("observation_space", observation), to_space("action_space", action)
        self.policy: Policy = build(seen, done, section, seed)
        self._schema = fragment_schema(seen, done)
        factories = [lambda: Sampling(observation, action)] * SLOTS
        vector = SyncVectorEnv(factories, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)
        self._stepper = Stepper(vector, seen)
        self._builder = FragmentBuilder(self._schema, STEPS, SLOTS)
        self._builder.start(self._stepper.reset([seed + slot for slot in range(SLOTS)]))
        self._sequence = 0

    def batch(self) -> Batch:
        """Of some fragments that the policy has just made and the checks of broker and learner let pass."""
        fragments = [self._fragment() for _ in range(FRAGMENTS)]
        for fragment in fragments:
            check(fragment, self._schema, "run-a")
            check_meaning(fragment.header, fragment.arrays())
        read = [(fragment.header, fragment.arrays()) for fragment in fragments]
        return assemble(read, torch.device("cpu"))

    def _fragment(self) -> FragmentFragment:
        while not self._builder.is_full:
            acted = self.policy.act(self._builder.observation())
            stepped = self._stepper.step(self.policy.environment_action(acted.action))
            self._builder.record(acted.action, acted.log_prob, stepped)
        self._sequence += 1
        fields = HeaderFields(
            run="run-a", session=1, sequence=self._sequence, weights=Publication(1, 0), round=0
        )
        return self._builder.cut(fields)[0]
