"""Settings for language models of any size: the layer under file, environment and flags."""

from typing import Any


def for_environment(environment_id: str, algorithm: str) -> dict[str, Any]:
    """Return the defaults of a task, as nested settings.

    environment_id: any name for the task. algorithm: "" means token-level PPO.
    """
    del environment_id
    layers: dict[str, Any] = {
        "environment": {"count": 64},
        "actor": {"count": 1, "unroll_length": 128},
        "learner": {"total_steps": 1_000_000, "stop_at_target": False},
        "evaluation": {"episodes": 128, "deterministic": False, "both": True, "base": True},
    }
    return layers | ({"algorithm": {"name": "token_ppo"}} if algorithm == "ppo" else {})
