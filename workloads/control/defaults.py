"""Settings that are known to learn, by environment id: the layer under file, environment and flags."""

from typing import Any, Final

_BASE: Final[dict[str, Any]] = {
    "environment": {"count": 16},
    "actor": {"count": 2, "unroll_length": 64},
    "policy": {"normalise_observations": True},
    "algorithm": {
        "batch_steps": 4096, "epochs": 6, "minibatches": 16, "learning_rate": 5e-4,
        "learning_rate_schedule": "linear", "scale_rewards": True,
    },
    "learner": {"total_steps": 1_000_000},
}  # fmt: skip

_BY_NAME: Final[dict[str, dict[str, Any]]] = {
    "CartPole": {
        "environment": {"count": 16},
        "actor": {"unroll_length": 32},
        "algorithm": {
            "batch_steps": 1024, "epochs": 6, "minibatches": 4, "discount": 0.98, "gae_lambda": 0.8,
            "learning_rate": 2e-3, "learning_rate_schedule": "linear",
        },
        "learner": {"total_steps": 150_000},
    },
    "Acrobot": {
        "environment": {"count": 8},
        "actor": {"unroll_length": 128},
        "policy": {"normalise_observations": True},
        "algorithm": {
            "batch_steps": 2048, "epochs": 4, "minibatches": 8, "discount": 0.99, "gae_lambda": 0.94,
            "learning_rate": 1e-3, "learning_rate_schedule": "linear", "scale_rewards": True,
        },
        "learner": {"total_steps": 500_000},
    },
    "Pendulum": {
        "environment": {"count": 8},
        "actor": {"unroll_length": 64},
        "algorithm": {
            "batch_steps": 2048, "epochs": 10, "minibatches": 8, "discount": 0.9, "gae_lambda": 0.95,
            "learning_rate": 1e-3, "scale_rewards": True,
        },
        "learner": {"total_steps": 300_000, "target_return": -250.0},
    },
    "LunarLander": {
        "environment": {"count": 16},
        "actor": {"unroll_length": 64},
        "policy": {"normalise_observations": True},
        "algorithm": {
            "batch_steps": 4096, "epochs": 6, "minibatches": 16, "discount": 0.999, "gae_lambda": 0.98,
            "entropy_coefficient": 0.01, "learning_rate": 1e-3, "learning_rate_schedule": "linear",
            "scale_rewards": True,
        },
        "learner": {"total_steps": 1_000_000},
    },
    "HalfCheetah": {
        "environment": {"count": 16},
        "actor": {"unroll_length": 64},
        "policy": {"normalise_observations": True},
        "algorithm": {
            "batch_steps": 4096, "epochs": 10, "minibatches": 32, "discount": 0.99, "gae_lambda": 0.95,
            "learning_rate": 3e-4, "learning_rate_schedule": "linear", "scale_rewards": True,
        },
        "learner": {"total_steps": 1_000_000, "target_return": 1500.0},
    },
    "Recall": {
        "environment": {"count": 16},
        "actor": {"unroll_length": 32},
        "policy": {"recurrent": "gru", "recurrent_size": 32, "hidden_sizes": [32], "shared_trunk": True},
        "algorithm": {
            "batch_steps": 2048, "epochs": 4, "minibatches": 4, "discount": 0.99, "gae_lambda": 0.95,
            "entropy_coefficient": 0.01, "learning_rate": 3e-3, "learning_rate_schedule": "linear",
        },
        "learner": {"total_steps": 300_000},
    },
    "Menu": {
        "environment": {"count": 16, "mask_key": "action_mask"},
        "actor": {"unroll_length": 32},
        "algorithm": {
            "batch_steps": 1024, "epochs": 6, "minibatches": 4, "discount": 0.9, "gae_lambda": 0.8,
            "entropy_coefficient": 0.01, "learning_rate": 2e-3, "learning_rate_schedule": "linear",
        },
        "learner": {"total_steps": 100_000},
    },
}  # fmt: skip


def for_environment(environment_id: str) -> dict[str, Any]:
    """Nested settings for any Gymnasium id: of its family (`CartPole` of `CartPole-v1`), else general."""
    family = environment_id.rpartition(":")[2].rpartition("/")[2].partition("-v")[0]
    return _BY_NAME.get(family, _BASE)
