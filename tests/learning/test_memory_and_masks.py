"""A memory is learned where it is needed, and masks make the best of what is allowed.

Small forms of the proofs.
"""

from typing import Any

import pytest

from tests.learning.small_form import EPISODES, learned, settings_of

TASKS = "penstock.workloads.control.tasks"
RECALL, MENU = f"{TASKS}:Recall-v0", f"{TASKS}:Menu-v0"
SHORT: dict[str, Any] = {
    "environment": {"kwargs": {"cues": 2, "delay": 4}},
    "actor": {"unroll_length": 16},
    "algorithm": {"batch_steps": 1024},
}


@pytest.mark.parametrize(
    "policy", [{"recurrent": "gru"}, {"recurrent": "lstm"}, {"recurrent": "none", "frame_stack": 6}], ids=str
)
def test_a_policy_that_remembers_recalls_the_cue(policy: dict[str, Any]) -> None:
    assert learned(settings_of(RECALL, 1, 20_000, policy=policy, **SHORT)) >= 0.95


def test_a_policy_that_cannot_remember_stays_at_chance() -> None:
    found = learned(
        settings_of(RECALL, 1, 6_000, policy={"recurrent": "none"}, algorithm={"batch_steps": 1024})
    )
    assert abs(found - 0.25) <= 4 * (0.25 * 0.75 / EPISODES) ** 0.5


def test_masks_make_the_best_of_every_menu() -> None:
    assert learned(settings_of(MENU, 2, 8_000)) >= 7.78
    assert learned(settings_of(MENU, 2, 4_000, environment={"mask_key": ""})) <= 2.0
