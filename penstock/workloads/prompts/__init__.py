"""Prompts: a policy that chooses the mutation which improves a prompt, from its embedding.

Importing this package imports nothing heavy, and nothing in it but the tasks imports Gymnasium.
"""

from typing import Any, Final

from penstock.config.workload import Workload

WORKLOAD = Workload(
    name="prompts",
    environment="penstock.workloads.control.environment:make",
    spaces="penstock.workloads.control.environment:spaces",
    environments={"Prompts-v0": "penstock.workloads.prompts.tasks"},
    target="penstock.workloads.control.environment:target",
    defaults="penstock.workloads.prompts:for_environment",
    acting="penstock.policy.acting_build:build_acting",
    site="penstock.workloads.prompts.http.prompt_routes:site",
    commands={"prompts": "penstock.workloads.prompts.commands:prompt_commands"},
    places=("reward_source", "embedding_url", "embedding_key_file"),
)

# ---- The network and the numbers of `penstock/recipes/prompts.toml`.

_TASK: Final[dict[str, Any]] = {
    "environment": {"count": 16},
    "actor": {"count": 1, "unroll_length": 32},
    "policy": {
        "hidden_sizes": [256, 256, 128], "activation": "relu", "hidden_norm": "batch", "dropout": 0.1,
        "initialisation": "xavier",
    },
    "evaluation": {"episodes": 100},
    "learner": {"total_steps": 200_000},
}  # fmt: skip
_PPO: Final[dict[str, Any]] = {
    "batch_steps": 2048, "epochs": 4, "minibatches": 32, "discount": 0.99, "gae_lambda": 0.95,
    "clip_range": 0.2, "value_clip": 0.2, "value_coefficient": 0.5, "entropy_coefficient": 0.01,
    "learning_rate": 3e-4, "learning_rate_schedule": "linear", "max_gradient_norm": 0.5,
}  # fmt: skip
_REPLAY: Final[dict[str, Any]] = {
    **_TASK,
    "policy": {"hidden_sizes": [256, 256, 128], "activation": "relu"},
}


def for_environment(environment_id: str, algorithm: str) -> dict[str, Any]:
    """Return a layer of settings; algorithms that replay experience have neither batch norm nor dropout."""
    del environment_id  # there is one
    if algorithm == "ppo":
        return _TASK | {"algorithm": _PPO}
    return _REPLAY if algorithm in ("dqn", "sac") else _TASK
