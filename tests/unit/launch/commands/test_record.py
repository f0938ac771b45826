"""`penstock record` plays what the run's actors played: with memory, frames and masks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.actor import specification as actor_run
from penstock.launch.commands.play import record
from penstock.launch.commands.request import Request
from penstock.launch.run.plan import make_plan
from penstock.learner.feed.recorded_feed import Recording
from penstock.learner.model import make_model
from penstock.learner.publish.kept_versions import FinalPolicy
from penstock.policy import weights

MENU = "Menu-v0"


@pytest.mark.parametrize(
    ("what", "settings"),
    [
        ("CartPole-v1", ("policy.recurrent=lstm", "policy.burn_in=2", "policy.frame_stack=2")),
        (MENU, ("environment.mask_key=action_mask",)),
        (MENU, ("environment.mask_key=action_mask", "algorithm.name=dqn", "policy.frame_stack=3")),
    ],
)
def test_a_policy_that_remembers_or_is_masked_is_recorded(
    what: str, settings: tuple[str, ...], tmp_path: Path
) -> None:
    small = ("environment.count=2", "actor.unroll_length=16")
    plan = make_plan(Request(what=what, run_dir=tmp_path / "r", assignments=(*settings, *small)))
    model = make_model(plan.settings)
    (policy,) = model.algorithm.published_modules().values()
    final = FinalPolicy(specification=model.specification, blob=weights.encode(policy), version=1, update=0)
    made = actor_run.read(model.specification, plan.settings.actor)
    account = record(made, final, tmp_path / "out", steps=200, seed=1, deterministic=False)
    assert account["steps"] >= 200
    content = Recording(tmp_path / "out")
    content.check_schema(model.specification.schema.schema_id)
    arrays: list[Any] = [one for _, one in content.load(content.fragments)]
    remembered = [name for name in arrays[1] if name.startswith("state/")]
    assert bool(remembered) == any(text.startswith("policy.") for text in settings)
    assert all(np.any(arrays[1][name]) for name in remembered)
