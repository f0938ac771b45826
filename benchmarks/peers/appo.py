"""Sample Factory's APPO, run in an environment of its own (`make bench-peers`).

`python appo.py TASK --target RETURN --seed N` trains to the end of its budget, two rollout workers and a
learner, each a process, and prints one JSON line: steps, seconds (of training, from the first experience on),
solved_s (of training until the mean return of the last 100 training episodes was RETURN, null if never),
solved_at (the same moment, seconds since the epoch).
"""

import argparse
import json
import sys
import tempfile
import time
from typing import Any

import gymnasium
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args  # type: ignore[import-not-found]
from sample_factory.envs.env_utils import register_env  # type: ignore[import-not-found]
from sample_factory.train import make_runner  # type: ignore[import-not-found]

WINDOW = 100
TASKS: dict[str, dict[str, Any]] = {
    "CartPole-v1": {
        "train_for_env_steps": 150_000,
        "num_epochs": 6,
        "learning_rate": 0.002,
        "gamma": 0.98,
        "gae_lambda": 0.8,
        "exploration_loss_coeff": 0.0,
    },
    "Acrobot-v1": {
        "train_for_env_steps": 300_000,
        "num_epochs": 4,
        "learning_rate": 0.001,
        "gamma": 0.99,
        "gae_lambda": 0.94,
        "exploration_loss_coeff": 0.0,
        "normalize_input": True,
        "normalize_returns": True,
        "reward_scale": 1.0,
    },
    "LunarLander-v3": {
        "train_for_env_steps": 1_000_000,
        "num_epochs": 4,
        "learning_rate": 0.001,
        "gamma": 0.999,
        "gae_lambda": 0.98,
        "exploration_loss_coeff": 0.01,
        "normalize_input": True,
        "normalize_returns": True,
        "reward_scale": 1.0,
    },
}
"""What differs: the discounts, epochs and rates that ours has."""
NAMES = {"LunarLander-v3": "LunarLander-v2"}
"""As the Gymnasium that Sample Factory asks for calls it."""
OPTIONS = {
    "algo": "APPO",
    "experiment": "peer",
    "device": "cpu",
    "stats_avg": WINDOW,
    "num_workers": 2,
    "num_envs_per_worker": 16,
    "worker_num_splits": 2,
    "rollout": 32,
    "recurrence": 1,
    "use_rnn": False,
    "with_vtrace": False,
    "batch_size": 256,
    "num_batches_per_epoch": 4,
    "shuffle_minibatches": True,
    "encoder_mlp_layers": "64 64",
    "nonlinearity": "tanh",
    "normalize_input": False,
    "normalize_returns": False,
    "value_bootstrap": True,
    "ppo_clip_ratio": 0.2,
    "ppo_clip_value": 1000.0,
    "max_grad_norm": 0.5,
    "reward_scale": 0.1,
    "decorrelate_envs_on_one_worker": False,
    "decorrelate_experience_max_seconds": 0,
}


def make_environment(name: str, *_: Any, render_mode: str | None = None, **__: Any) -> Any:
    """Return the environment by Sample Factory's conventions."""
    return gymnasium.make(NAMES.get(name, name), render_mode=render_mode)


class Clock:
    """Notes experience, steps and episodes as the runner reports them."""

    def __init__(self, target: float) -> None:
        self.target = target
        self.began_s: float | None = None
        self.steps = 0
        self.seconds = 0.0
        self.solved_s: float | None = None
        self.solved_at: float | None = None

    def played(self, _runner: Any, _message: dict[str, Any], _policy: int) -> None:
        """Note the first experience, with which training begins.

        The end of the first episode is the first report of it.
        """
        if self.began_s is None:
            self.began_s = time.perf_counter()

    def trained(self, runner: Any, message: dict[str, Any], policy: int) -> None:
        """Note the state after every training iteration."""
        self.steps = message["learner_env_steps"]
        self.seconds = time.perf_counter() - (self.began_s or time.perf_counter())
        returns = runner.policy_avg_stats.get("reward", [()])[policy]
        if self.solved_s is None and len(returns) == WINDOW and sum(returns) / WINDOW >= self.target:
            self.solved_s, self.solved_at = self.seconds, time.time()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--target", type=float, required=True)
    parser.add_argument("--seed", type=int, default=0)
    said = parser.parse_args()
    register_env(said.task, make_environment)
    clock = Clock(said.target)
    with tempfile.TemporaryDirectory() as folder:
        options = OPTIONS | TASKS[said.task] | {"env": said.task, "seed": said.seed, "train_dir": folder}
        arguments = [text for name, value in options.items() for text in (f"--{name}", *str(value).split())]
        options_parser, _ = parse_sf_args(arguments)
        _, runner = make_runner(parse_full_cfg(options_parser, arguments))
        runner.register_episodic_stats_handler(clock.played)
        runner.policy_msg_handlers["learner_env_steps"].append(clock.trained)
        runner.init()
        runner.run()
    outcome = {
        "steps": clock.steps,
        "seconds": clock.seconds,
        "solved_s": clock.solved_s,
        "solved_at": clock.solved_at,
    }
    sys.stdout.write("\n" + json.dumps(outcome) + "\n")


if __name__ == "__main__":
    main()
