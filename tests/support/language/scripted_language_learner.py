"""The learner's side of a run of language models, one call at a time, and what it makes of a fragment."""

from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from penstock.policy.tokens import TokenRows
from penstock.protocol.fragment import Fragment
from penstock.protocol.specification import Probe
from penstock.workloads.language.reward.reward_source import Sample
from tests.support.run.actor_run import Plan, ScriptedLearner

UNROLL: Final = 12
PATIENCE_S: Final = 120.0


class ScriptedLanguageLearner(ScriptedLearner):
    """Every publication is another adapter."""

    def __init__(self, redis_url: str, base: Path, *, evaluates_base: bool = False, **kwargs: Any) -> None:
        """kwargs: of the environment.

        The places that its specification names are those of another machine.
        """
        told = {"model": str(base), "prompts": "/theirs", "reward": "theirs:function", "response_tokens": 8}
        plan = Plan(
            workload="rlhf",
            unroll=UNROLL,
            environment={"id": "words", "count": 8, "kwargs": told | kwargs},
            policy={"kwargs": {"model": str(base), "rank": 4}},
            evaluation={"episodes": 6, "both": True, "base": evaluates_base},
        )
        super().__init__(redis_url, plan)

    def base_policy(self) -> Any:
        """The policy that training begins with: a new adapter does nothing."""
        return super().build(0)

    def build(self, seed: int) -> Any:
        """A policy whose adapter does something."""
        policy = self.base_policy()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in policy.trained().values():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        return policy

    def _make_probe(self) -> Probe:
        rows = np.random.default_rng(0).integers(4, 30, (2, 6))
        return Probe({"observation": rows[:, :-1]}, {"action": rows[:, 1:]})


def log_probs(learner: ScriptedLanguageLearner, fragment: Fragment) -> Any:
    """What the learner's side finds for the tokens that were drawn, under the version in the header: [n]."""
    arrays: dict[str, Any] = fragment.arrays()
    rows = torch.from_numpy(arrays["observation"][:-1].T.copy())
    valid = torch.from_numpy(arrays["valid"].T.copy())
    last = valid.long().cumsum(1).argmax(1)
    present = torch.arange(rows.shape[1]) <= last[:, None]
    place = valid.flatten().nonzero()[:, 0]
    action = torch.from_numpy(arrays["action"].T.copy()).flatten()[place]
    policy: Any = learner.policies[fragment.header.oldest_version]
    with torch.no_grad():
        return policy.outputs(TokenRows(rows, present, place, action)).log_prob.numpy()


def responses(fragment: Fragment, base: Path) -> list[Sample]:
    """Prompt and response of each column, as token ids."""
    arrays: dict[str, Any] = fragment.arrays()
    found = []
    for slot in range(arrays["valid"].shape[1]):
        drawn = arrays["valid"][:, slot].nonzero()[0]
        ids = arrays["observation"][:, slot].tolist()
        first, last = int(drawn[0]), int(drawn[-1])
        found.append(
            Sample(prompt_ids=tuple(ids[: first + 1]), response_ids=tuple(ids[first + 1 : last + 2]))
        )
    return found
