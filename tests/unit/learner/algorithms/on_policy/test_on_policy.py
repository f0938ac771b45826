"""What IMPALA and REINFORCE share with PPO, and what is their own.

Their numbers are checked against TorchRL.
"""

from typing import Any

import pytest

from penstock.config.algorithm_sections import SECTIONS
from penstock.config.settings import ImpalaSection, ReinforceSection
from penstock.learner.algorithms.algorithm import Algorithm
from penstock.learner.algorithms.ppo import Impala, Reinforce
from penstock.learner.algorithms.registry import ALGORITHMS
from penstock.learner.batch import Batch
from penstock.policy import weights
from tests.support.experience.experience import collect, small_policy

NAMES = ("impala", "reinforce")


def make(name: str, policy: dict[str, Any] | None = None, **section: Any) -> Algorithm:
    """A small one."""
    made = {"impala": ImpalaSection, "reinforce": ReinforceSection}[name](**section)
    return ALGORITHMS[name](small_policy(0, **(policy or {})), made, seed=0)


def experience() -> Batch:
    """Of another policy than the one that learns."""
    return collect(small_policy(7))


def test_every_section_has_its_algorithm() -> None:
    assert SECTIONS.keys() == ALGORITHMS.keys()
    assert all(section.model_fields["name"].default == name for name, section in SECTIONS.items())


@pytest.mark.parametrize("name", NAMES)
def test_an_update_is_one_gradient_step(name: str) -> None:
    algorithm = make(name, {"normalise_observations": True})
    batch = experience()
    update = algorithm.update(batch, progress=0.0)
    assert (update.applied, update.gradient_steps, update.steps) == (True, 1, batch.valid.numel())
    assert algorithm.updates == 1


@pytest.mark.parametrize("name", NAMES)
def test_rates_and_coefficients_are_scheduled_and_told(name: str) -> None:
    algorithm = make(
        name, learning_rate=1e-3, learning_rate_schedule="linear", warmup_updates=2,
        entropy_coefficient=0.1, entropy_decay=0.5, entropy_floor=0.04,
    )  # fmt: skip
    told = [algorithm.update(experience(), progress=p).metrics for p in (0.0, 0.25, 0.5)]
    assert [m["learning_rate"] for m in told] == pytest.approx([0.5e-3, 0.75e-3, 0.5e-3])
    assert [m["entropy_coefficient"] for m in told] == [0.1, 0.05, 0.04]


def test_impala_weighs_experience_by_its_ratio_and_reinforce_does_not() -> None:
    numbers: dict[str, Any] = {"normalise_advantages": False, "max_gradient_norm": 0.0}
    for batch, alike in ((collect(small_policy(0)), True), (experience(), False)):
        impala = Impala(small_policy(0), ImpalaSection(**numbers), seed=0)
        reinforce = Reinforce(small_policy(0), ReinforceSection(**numbers), seed=0)
        losses = [a.update(batch, progress=0.0).metrics["policy_loss"] for a in (impala, reinforce)]
        assert (losses[0] == pytest.approx(losses[1], rel=1e-4)) is alike


def test_truncated_ratios_bound_what_a_step_weighs() -> None:
    impala = make("impala", rho_clip=0.0, value_coefficient=0.0)
    before = weights.encode(impala.published_modules()["default"])
    assert impala.update(experience(), progress=0.0).metrics["gradient_norm"] == 0.0
    assert weights.encode(impala.published_modules()["default"]) == before
