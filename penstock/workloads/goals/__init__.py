"""Goals: learn from logs of tasks, and which goal a live system should have next.

Importing this package imports nothing heavy.
"""

from typing import Any, Final

from penstock.config.workload import Workload

WORKLOAD = Workload(
    name="goals",
    environment="penstock.workloads.control.environment:make",
    spaces="penstock.workloads.control.environment:spaces",
    environments={
        "Goals-v0": "penstock.workloads.goals.tasks",
        "Traces-v0": "penstock.workloads.goals.tasks",
    },
    target="penstock.workloads.goals.live_host:target",
    defaults="penstock.workloads.goals:for_environment",
    acting="penstock.policy.acting_build:build_acting",
    places=("goals", "trace_file"),
    prepare="penstock.workloads.goals.live_host:prepare",
    rehearse="penstock.workloads.goals.live_host:rehearse",
    http="penstock.workloads.goals.http.goals_service:service",
    commands={
        "inject": "penstock.workloads.goals.commands:inject",
        "traces": "penstock.workloads.goals.commands:trace_commands",
    },
)

_TASK: Final[dict[str, Any]] = {
    "environment": {"count": 16},
    "actor": {"count": 1, "unroll_length": 32},
    "evaluation": {"episodes": 100},
    "learner": {"total_steps": 300_000},
}
_ALGORITHMS: Final[dict[str, dict[str, Any]]] = {
    "ppo": {
        "batch_steps": 2048, "epochs": 6, "minibatches": 8, "discount": 0.95, "gae_lambda": 0.9,
        "entropy_coefficient": 0.005, "learning_rate": 2e-3, "learning_rate_schedule": "linear",
    },
    "dqn": {
        "learning_rate": 1e-3, "batch_size": 64, "replay_ratio": 0.25, "discount": 0.9, "target_period": 200,
        "epsilon_fraction": 0.2, "epsilon_final": 0.02, "learning_rate_schedule": "linear",
    },
}  # fmt: skip
_REPLAY: Final[dict[str, Any]] = {
    "environment": {"count": 8},
    "actor": {"count": 1, "unroll_length": 16},
    "policy": {"hidden_sizes": [128, 128], "activation": "relu"},
    "evaluation": {"episodes": 100},
    "learner": {"total_steps": 150_000},
}

_TRACES: Final[dict[str, Any]] = {
    "environment": {"count": 16},
    "actor": {"count": 1, "unroll_length": 32},
    "policy": {"normalise_observations": True},
    "evaluation": {"episodes": 200},
    "learner": {"total_steps": 200_000},
}
_REPLAYED: Final[dict[str, dict[str, Any]]] = {
    "dqn": {
        **_TRACES,
        "policy": {"hidden_sizes": [128, 128], "activation": "relu", "normalise_observations": True},
        "algorithm": {"learning_rate": 1e-3, "batch_size": 128, "replay_ratio": 1.0, "target_period": 200},
    }
}


def for_environment(environment_id: str, algorithm: str) -> dict[str, Any]:
    if algorithm == "random":
        return {**_TASK, "evaluation": {"episodes": 100, "deterministic": False}}
    if environment_id.endswith("Traces-v0"):
        return _REPLAYED.get(algorithm, _TRACES)
    task = _REPLAY if algorithm == "dqn" else _TASK
    numbers = _ALGORITHMS.get(algorithm)
    return task | ({"algorithm": numbers} if numbers else {})
