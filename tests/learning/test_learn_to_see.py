"""Small forms of the proofs that a policy sees: images, parts of a Dict, and a hybrid action that fits them.

Thresholds lie far above what a policy reaches that does not look, whose return is known in closed form.
"""

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from tests.learning.small_form import learned, settings_of

TASKS = "penstock.workloads.control.tasks"
SMALL_CATCH = {"kwargs": {"rows": 6, "columns": 5}}
BLIND_CATCH = 2 / 5 - 1


class Aim(gymnasium.Env[Any, Any]):
    """One step: press the button that is shown and point where it is shown.

    1 − |error| for the right button, else 0.

    A policy that does not look presses the right one of three in a third of the cases, and points 1/2 off at
    best.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - Gymnasium declares it so
    observation_space = spaces.Dict(button=spaces.Discrete(3), at=spaces.Box(-1, 1, (1,), np.float32))
    action_space = spaces.Tuple((spaces.Discrete(3), spaces.Box(-1, 1, (1,), np.float32)))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Show another one."""
        super().reset(seed=seed)
        self._button = int(self.np_random.integers(3))
        self._at = self.np_random.uniform(-1, 1, 1).astype(np.float32)
        return self._look(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """action: button and place."""
        button, place = action
        reward = 1.0 - abs(float(place[0] - self._at[0])) if button == self._button else 0.0
        return self._look(), reward, True, False, {}

    def _look(self) -> dict[str, Any]:
        return {"button": np.int64(self._button), "at": self._at}


BLIND_AIM = 1 / 3 * 1 / 2


def test_an_image_is_learned_from() -> None:
    settings = settings_of(f"{TASKS}:Catch-v0", 1, 12_288, environment=SMALL_CATCH)
    assert learned(settings) >= 0.8 > BLIND_CATCH + 1.0


def test_every_part_of_a_dict_is_learned_from() -> None:
    assert learned(settings_of(f"{TASKS}:Courier-v0", 1, 16_384)) >= 0.45


@pytest.mark.parametrize("section", [{}, {"hidden_norm": "layer", "dropout": 0.1}, {"hidden_norm": "batch"}])
def test_both_parts_of_a_hybrid_action_are_learned(
    section: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    gymnasium.register("Aim-v0", lambda **_: Aim())
    try:
        algorithm = {
            "batch_steps": 256,
            "epochs": 4,
            "minibatches": 4,
            "learning_rate": 5e-3,
            "discount": 0.0,
        }
        told = {"policy": section, "algorithm": algorithm, "actor": {"unroll_length": 16}}
        settings = settings_of("Aim-v0", 1, 6_144, **told)
        assert learned(settings) >= 0.8 > BLIND_AIM + 0.6
    finally:
        gymnasium.registry.pop("Aim-v0")
