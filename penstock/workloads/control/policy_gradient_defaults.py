"""What IMPALA and REINFORCE want otherwise than PPO: smaller batches, since each is one gradient step."""

from typing import Any, Final

GENERAL: Final = ""

IMPALA: Final[dict[str, dict[str, Any]]] = {
    GENERAL: {
        "actor": {"unroll_length": 32},
        "algorithm": {
            "batch_steps": 1024, "entropy_coefficient": 0.01, "learning_rate": 1e-3,
            "learning_rate_schedule": "linear", "normalise_advantages": True, "scale_rewards": True,
        },
    },
    "CartPole": {
        "actor": {"count": 2, "unroll_length": 32},
        "algorithm": {
            "batch_steps": 512, "discount": 0.98, "entropy_coefficient": 0.01, "learning_rate": 2e-3,
            "learning_rate_schedule": "linear", "normalise_advantages": True, "scale_rewards": True,
        },
        "learner": {"total_steps": 300_000},
    },
}  # fmt: skip

REINFORCE: Final[dict[str, dict[str, Any]]] = {
    GENERAL: {
        "algorithm": {
            "batch_steps": 2048, "entropy_coefficient": 0.01, "learning_rate": 1e-3,
            "learning_rate_schedule": "linear", "scale_rewards": True,
        },
    },
    "CartPole": {
        "actor": {"count": 2, "unroll_length": 32},
        "algorithm": {
            "batch_steps": 512, "discount": 0.98, "entropy_coefficient": 0.01, "learning_rate": 2e-3,
            "learning_rate_schedule": "linear",
        },
        "learner": {"total_steps": 300_000},
    },
}  # fmt: skip
