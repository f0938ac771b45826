"""Settings of thoughts of any task: the layer under file, environment and flags."""

from typing import Any


def for_environment(environment_id: str, algorithm: str) -> dict[str, Any]:
    """Return the defaults of a run, as nested settings.

    environment_id: any name for the task. algorithm: "" means REINFORCE of thoughts.
    """
    del environment_id
    layers: dict[str, Any] = {
        "environment": {"count": 128},
        "policy": {"kwargs": {"lora": False}},
        "actor": {"count": 1, "unroll_length": 25},
        "learner": {
            "device": "cpu",  # all that it can learn on; `auto` is a GPU where there is one
            "total_steps": 10_000_000,
            "total_updates": 400,
            "stop_at_target": False,
        },
        "evaluation": {"episodes": 256, "deterministic": False, "both": True},
    }
    return layers | ({"algorithm": {"name": "thought_reinforce"}} if algorithm == "ppo" else {})
