"""Stable-Baselines3's PPO, run in an environment of its own (`make bench-peers`).

`python sb3.py zoo|wide TASK --target RETURN --seed N` trains to the end of its budget and prints one JSON
line: steps, seconds (of training, without start-up), solved_s (of training until the mean return of the last
100 training episodes was RETURN, null if never), solved_at (the same moment, seconds since the epoch).

    zoo     hyper-parameters of RL Baselines3 Zoo for this task
    wide    32 environments × 64 steps, 4 epochs of 8 minibatches, the zoo's discounts
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from stable_baselines3 import PPO  # type: ignore[import-not-found, unused-ignore]
from stable_baselines3.common.env_util import make_vec_env  # type: ignore[import-not-found, unused-ignore]
from stable_baselines3.common.vec_env import VecNormalize  # type: ignore[import-not-found, unused-ignore]

WINDOW = 100


def falling(start: float) -> Callable[[float], float]:
    """Return a schedule from `start` to 0."""
    return lambda left: start * left


_CARTPOLE: dict[str, Any] = {"gae_lambda": 0.8, "gamma": 0.98, "ent_coef": 0.0}
_ACROBOT: dict[str, Any] = {"gae_lambda": 0.94, "gamma": 0.99, "ent_coef": 0.0}
_LUNAR_LANDER: dict[str, Any] = {"gae_lambda": 0.98, "gamma": 0.999, "ent_coef": 0.01}
_WIDE: dict[str, Any] = {"n_steps": 64, "batch_size": 256, "n_epochs": 4}

CASES: dict[tuple[str, str], dict[str, Any]] = {
    ("CartPole-v1", "zoo"): {
        "envs": 8,
        "steps": 100_000,
        "ppo": {
            **_CARTPOLE,
            "n_steps": 32,
            "batch_size": 256,
            "n_epochs": 20,
            "learning_rate": falling(0.001),
            "clip_range": falling(0.2),
        },
    },
    ("CartPole-v1", "wide"): {
        "envs": 32,
        "steps": 163_840,
        "ppo": {**_CARTPOLE, **_WIDE, "learning_rate": falling(0.002)},
    },
    ("Acrobot-v1", "zoo"): {
        "envs": 16,
        "steps": 300_000,
        "normalize": True,
        "ppo": {**_ACROBOT, "n_steps": 256, "n_epochs": 4},
    },
    ("Acrobot-v1", "wide"): {
        "envs": 32,
        "steps": 300_000,
        "normalize": True,
        "ppo": {**_ACROBOT, **_WIDE, "learning_rate": falling(0.001)},
    },
    ("LunarLander-v3", "zoo"): {
        "envs": 16,
        "steps": 1_000_000,
        "ppo": {**_LUNAR_LANDER, "n_steps": 1024, "batch_size": 64, "n_epochs": 4},
    },
    ("LunarLander-v3", "wide"): {
        "envs": 32,
        "steps": 1_000_000,
        "ppo": {**_LUNAR_LANDER, **_WIDE, "learning_rate": falling(0.001)},
    },
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=("zoo", "wide"))
    parser.add_argument("task", choices=sorted({task for task, _ in CASES}))
    parser.add_argument("--target", type=float, required=True)
    parser.add_argument("--seed", type=int, default=0)
    said = parser.parse_args()
    case = CASES[said.task, said.case]
    torch.set_num_threads(1)  # for networks this small more threads are slower
    environments = make_vec_env(said.task, n_envs=case["envs"], seed=said.seed)
    if case.get("normalize"):
        environments = VecNormalize(environments, gamma=case["ppo"]["gamma"])
    model = PPO("MlpPolicy", environments, seed=said.seed, device="cpu", **case["ppo"])
    solved: dict[str, float | None] = {"solved_s": None, "solved_at": None}
    began_s = time.perf_counter()

    def look(_locals: dict[str, Any], _globals: dict[str, Any]) -> bool:
        """Note the returns, once per rollout, after a step of all environments."""
        if model.num_timesteps % (case["envs"] * case["ppo"]["n_steps"]) == 0 and solved["solved_s"] is None:
            returns = [episode["r"] for episode in model.ep_info_buffer or ()]
            if len(returns) == WINDOW and sum(returns) / WINDOW >= said.target:
                solved.update(solved_s=time.perf_counter() - began_s, solved_at=time.time())
        return True

    model.learn(case["steps"], callback=look)
    seconds = time.perf_counter() - began_s
    sys.stdout.write(json.dumps({"steps": model.num_timesteps, "seconds": seconds, **solved}) + "\n")


if __name__ == "__main__":
    main()
