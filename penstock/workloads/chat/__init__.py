"""Chat: a model that is trained from people's ratings, and rolled back when they rate it worse.

Importing this package imports nothing heavy.
"""

from typing import Any, Final

from penstock.config.workload import Workload

WORKLOAD = Workload(
    name="chat",
    environment="penstock.workloads.control.environment:make",
    spaces="penstock.workloads.control.environment:spaces",
    environments={
        "Chat-v0": "penstock.workloads.chat.tasks",
        "Candidates-v0": "penstock.workloads.chat.tasks",
    },
    target="penstock.workloads.control.environment:target",
    defaults="penstock.workloads.chat:for_environment",
    acting="penstock.policy.acting_build:build_acting",
    site="penstock.workloads.chat.http.chat_routes:site",
    commands={"chat": "penstock.workloads.chat.commands:chat_commands"},
    places=("model", "reward"),
)

_CANDIDATES: Final[dict[str, Any]] = {
    "environment": {"count": 64},
    "actor": {"count": 1, "unroll_length": 16},
    "evaluation": {"episodes": 400},
    "learner": {"total_steps": 300_000},
}
_PPO: Final[dict[str, Any]] = {
    # With advantages as they are, the entropy coefficient weighs the distance to an even policy.
    "normalise_advantages": False,
    "entropy_coefficient": 0.1,
    "batch_steps": 2048,
    "epochs": 4,
    "minibatches": 4,
    "learning_rate": 3e-3,
    "learning_rate_schedule": "linear",
}


def for_environment(environment_id: str, algorithm: str) -> dict[str, Any]:
    del environment_id  # there is one
    return _CANDIDATES | ({"algorithm": _PPO} if algorithm == "ppo" else {})
