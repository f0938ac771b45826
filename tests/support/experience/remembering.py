"""A rollout of a policy that remembers.

Environments with episodes of random length, masks, real fragments.
"""

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from penstock.actor.acting.masks import Masks
from penstock.actor.acting.stepper import Stepper
from penstock.actor.rollout.generator import FragmentBuilder, HeaderFields
from penstock.config.settings import PolicySection
from penstock.learner.batch import Batch, assemble, check_meaning
from penstock.policy.policy import Policy, build
from penstock.protocol.fragment import Fragment, check
from penstock.protocol.messages import Publication
from penstock.protocol.schema import FragmentSchema, fragment_schema, mask_rules, state_rules
from penstock.protocol.spaces import Box, Discrete

ACTIONS = 3
OBSERVATION = Box(np.full(3, -1, np.float32), np.full(3, 1, np.float32))
ACTION = Discrete(ACTIONS)
RUN = "run-a"


class Wandering(gymnasium.Env[Any, Any]):
    """Noise for observations, and random masks.

    An episode has at most `longest` steps and is terminated or truncated.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - Gymnasium declares it so
    observation_space = spaces.Box(-1, 1, (3,), np.float32)
    action_space = spaces.Discrete(ACTIONS)

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._left = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._left = int(self.np_random.integers(1, self._longest + 1))
        return self._look()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._left -= 1
        truncated = self._left == 0 and bool(self.np_random.integers(2))
        observation, info = self._look()
        return observation, float(action == 0), self._left == 0 and not truncated, truncated, info

    def _look(self) -> tuple[Any, dict[str, Any]]:
        mask = self.np_random.integers(0, 2, ACTIONS).astype(np.int8)
        mask[self.np_random.integers(ACTIONS)] = 1
        return self.np_random.uniform(-1, 1, 3).astype(np.float32), {"action_mask": mask}


def remembering(seed: int = 0, **section: Any) -> Policy:
    """A small policy over `Wandering`, with weights large enough that what is remembered matters."""
    policy = build(
        OBSERVATION,
        ACTION,
        PolicySection.model_validate({"hidden_sizes": (8,), "recurrent_size": 5} | section),
        seed,
    )
    with torch.no_grad():
        policy.actor_head.weight.mul_(100)
    return policy


def schema_of(policy: Policy, *, masked: bool = False) -> FragmentSchema:
    masks = mask_rules(ACTION) if masked else ()
    return fragment_schema(OBSERVATION, ACTION, (*masks, *state_rules(policy.state_space)))


class Actor:
    """What a rollout worker does, without threads."""

    def __init__(
        self,
        policy: Policy,
        *,
        mode: AutoresetMode = AutoresetMode.SAME_STEP,
        slots: int = 3,
        longest: int = 6,
        unroll: int = 8,
        seed: int = 0,
        masked: bool = False,
        final_masks: bool = False,
        session: int = 1,
    ) -> None:
        self.policy, self.session, self._sequence = policy, session, 0
        self.schema = schema_of(policy, masked=masked)
        factories = [lambda: Wandering(longest) for _ in range(slots)]
        vector: Any = SyncVectorEnv(factories, copy=False, autoreset_mode=mode)
        masks = Masks("action_mask", ACTION, slots) if masked else None
        self._stepper = Stepper(vector, OBSERVATION, masks)
        self._builder = FragmentBuilder(self.schema, unroll, slots, final_masks=final_masks)
        self._builder.start(self._stepper.reset(range(seed, seed + slots)) | policy.initial_state(slots))

    def fragment(self, steps: int) -> Fragment:
        for _ in range(steps):
            acted = self.policy.act(self._builder.observation())
            stepped = self._stepper.step(self.policy.environment_action(acted.action))
            self._builder.record(acted.action, acted.log_prob, stepped, acted.state)
        self._sequence += 1
        fields = HeaderFields(
            run=RUN, session=self.session, sequence=self._sequence, weights=Publication(1, 0), round=0
        )
        fragment, _ = self._builder.cut(fields)
        check(fragment, self.schema, RUN)
        check_meaning(fragment.header, fragment.arrays())
        return fragment


def batch_of(fragments: Sequence[Fragment]) -> Batch:
    return assemble([(fragment.header, fragment.arrays()) for fragment in fragments], torch.device("cpu"))


def entry_of(fragment: Fragment, number: int = 1) -> Batch:
    return assemble([(fragment.header, fragment.arrays())], torch.device("cpu"), [(number, 10)])
