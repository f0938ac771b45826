"""Stable-Baselines3's PPO on CartPole-v1, run in an environment of its own (`make bench-peers`).

`python sb3.py zoo|wide --seed N` trains to the end of its budget and prints one JSON line:
steps, seconds (of training, without start-up), solved_s (of training until the mean return of the last 100
training episodes was 475, null if never), solved_at (the same moment, seconds since the epoch).

    zoo     hyper-parameters of RL Baselines3 Zoo for this task
    wide    32 environments × 64 steps, 4 epochs of 8 minibatches, the zoo's discounts: its fastest that
            solves the task
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

TARGET = 475
WINDOW = 100


def falling(start: float) -> Callable[[float], float]:
    """Return a schedule from `start` to 0."""
    return lambda left: start * left


CASES: dict[str, dict[str, Any]] = {
    "zoo": {
        "envs": 8,
        "steps": 100_000,
        "ppo": {
            "n_steps": 32,
            "batch_size": 256,
            "gae_lambda": 0.8,
            "gamma": 0.98,
            "n_epochs": 20,
            "ent_coef": 0.0,
            "learning_rate": falling(0.001),
            "clip_range": falling(0.2),
        },
    },
    "wide": {
        "envs": 32,
        "steps": 163_840,
        "ppo": {
            "n_steps": 64,
            "batch_size": 256,
            "gae_lambda": 0.8,
            "gamma": 0.98,
            "n_epochs": 4,
            "ent_coef": 0.0,
            "learning_rate": falling(0.002),
        },
    },
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--seed", type=int, default=0)
    said = parser.parse_args()
    case = CASES[said.case]
    torch.set_num_threads(1)  # for networks this small more threads are slower
    environments = make_vec_env("CartPole-v1", n_envs=case["envs"], seed=said.seed)
    model = PPO("MlpPolicy", environments, seed=said.seed, device="cpu", **case["ppo"])
    solved: dict[str, float | None] = {"solved_s": None, "solved_at": None}
    began_s = time.perf_counter()

    def look(_locals: dict[str, Any], _globals: dict[str, Any]) -> bool:
        """Note the returns, once per rollout, after a step of all environments."""
        if model.num_timesteps % (case["envs"] * case["ppo"]["n_steps"]) == 0 and solved["solved_s"] is None:
            returns = [episode["r"] for episode in model.ep_info_buffer or ()]
            if len(returns) == WINDOW and sum(returns) / WINDOW >= TARGET:
                solved.update(solved_s=time.perf_counter() - began_s, solved_at=time.time())
        return True

    model.learn(case["steps"], callback=look)
    seconds = time.perf_counter() - began_s
    sys.stdout.write(json.dumps({"steps": model.num_timesteps, "seconds": seconds, **solved}) + "\n")


if __name__ == "__main__":
    main()
