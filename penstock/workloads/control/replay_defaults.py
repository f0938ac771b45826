"""Settings with which DQN and SAC are known to learn, by environment family.

After the tuned ones of RL Baselines3 Zoo, where it has some; steps of one environment there are steps of all
here.
"""

from typing import Any, Final

GENERAL: Final = ""

_DQN: Final[dict[str, Any]] = {
    "environment": {"count": 8},
    "actor": {"count": 1, "unroll_length": 16},
    "policy": {"hidden_sizes": [256, 256], "activation": "relu"},
    "algorithm": {
        "learning_rate": 5e-4, "replay_ratio": 0.5, "n_step": 3, "target_period": 500,
        "epsilon_fraction": 0.15,
    },
    "learner": {"total_steps": 200_000},
}  # fmt: skip

DQN: Final[dict[str, dict[str, Any]]] = {
    GENERAL: _DQN,
    "CartPole": {
        "environment": {"count": 8},
        "actor": {"count": 1, "unroll_length": 16},
        "policy": {"hidden_sizes": [256, 256], "activation": "relu"},
        "algorithm": {
            "learning_rate": 1e-3, "batch_size": 64, "replay_ratio": 0.5, "target_period": 100,
            "epsilon_fraction": 0.2, "epsilon_final": 0.04,
        },
        "learner": {"total_steps": 60_000},
    },
    "MountainCar": {
        "environment": {"count": 8},
        "actor": {"count": 1, "unroll_length": 16},
        "policy": {"hidden_sizes": [256, 256], "activation": "relu"},
        "algorithm": {
            "learning_rate": 4e-3, "learning_rate_schedule": "linear", "batch_size": 128, "replay_ratio": 0.5,
            "n_step": 3, "discount": 0.98, "capacity": 50_000, "target_period": 300, "epsilon_fraction": 0.2,
            "epsilon_final": 0.07,
        },
        "learner": {"total_steps": 120_000},
    },
    "LunarLander": {
        "environment": {"count": 8},
        "actor": {"count": 1, "unroll_length": 16},
        "policy": {"hidden_sizes": [256, 256], "activation": "relu"},
        "algorithm": {
            "learning_rate": 6.3e-4, "learning_rate_schedule": "linear", "batch_size": 128,
            "replay_ratio": 0.5, "n_step": 3, "capacity": 50_000, "target_period": 250,
            "epsilon_fraction": 0.12, "epsilon_final": 0.05,
        },
        "learner": {"total_steps": 200_000},
    },
}  # fmt: skip

_SAC: Final[dict[str, Any]] = {
    "environment": {"count": 4},
    "actor": {"count": 1, "unroll_length": 16},
    "policy": {"hidden_sizes": [256, 256], "activation": "relu"},
    "algorithm": {"learning_starts": 5_000, "batch_size": 128, "error_steps": 512, "capacity": 300_000},
    "learner": {"total_steps": 300_000, "threads": 2},
}

SAC: Final[dict[str, dict[str, Any]]] = {
    GENERAL: _SAC,
    "Pendulum": {
        "environment": {"count": 4},
        "actor": {"count": 1, "unroll_length": 8},
        "policy": {"hidden_sizes": [128, 128], "activation": "relu"},
        "algorithm": {
            "learning_rate": 1e-3, "batch_size": 128, "critic_hidden_sizes": [128, 128],
            "learning_starts": 500, "error_steps": 128,
        },
        "learner": {"total_steps": 20_000, "target_return": -180.0},
    },
    "HalfCheetah": {
        **_SAC,
        "learner": {"total_steps": 300_000, "target_return": 4000.0, "threads": 2},
    },
    "Hopper": {
        **_SAC,
        "learner": {"total_steps": 200_000, "target_return": 1500.0, "threads": 2},
    },
}  # fmt: skip
