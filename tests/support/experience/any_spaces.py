"""Experience of any spaces, by the parts of a real actor.

Environment → stepper → policy → fragments → batch.
"""

import copy
from typing import Any

import gymnasium
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from penstock.actor.acting.stepper import Stepper
from penstock.actor.rollout.generator import FragmentBuilder, HeaderFields
from penstock.config.settings import PolicySection
from penstock.learner.batch import Batch, assemble, check_meaning
from penstock.policy.policy import Policy, build
from penstock.protocol.fragment import Fragment, check
from penstock.protocol.messages import Publication
from penstock.protocol.schema import fragment_schema
from penstock.workloads.control.environment import to_space

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

    def _fragment(self) -> Fragment:
        while not self._builder.is_full:
            acted = self.policy.act(self._builder.observation())
            stepped = self._stepper.step(self.policy.environment_action(acted.action))
            self._builder.record(acted.action, acted.log_prob, stepped)
        self._sequence += 1
        fields = HeaderFields(
            run="run-a", session=1, sequence=self._sequence, weights=Publication(1, 0), round=0
        )
        return self._builder.cut(fields)[0]
