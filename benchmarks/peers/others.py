"""Other systems, each run in an environment of its own (`make bench-peers`): imported where they are used.

    others.py sb3 zoo|wide|sac|dqn TASK --target RETURN --seed N   Stable-Baselines3; --library sbx: SBX
    others.py appo TASK --target RETURN --seed N               Sample Factory's APPO
    others.py grpo FOLDER --threads N --warm W --batches B --seed S        TRL's GRPO of FOLDER/model
    others.py serve PORT                                       a Stable-Baselines3 policy behind FastAPI

A trainer runs to the end of its budget and prints one JSON line: steps, seconds (of training, from the first
experience on), solved_s (of training until the mean return of the last 100 training episodes was RETURN, null
if never), solved_at (the same moment, seconds since the epoch). `zoo`: hyper-parameters of RL Baselines3 Zoo;
`wide`: 32 environments × 64 steps, 4 epochs of 8 minibatches, the zoo's discounts. GRPO prints over B batches
behind W others: tokens (that were sampled and trained), seconds, cpu_seconds.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

WINDOW = 100


def liked(prompts: Sequence[Any], responses: Sequence[str]) -> list[float]:
    """Return the share of words that end with an even digit: the reward of TRL and of Penstock."""
    del prompts
    words = [response.split() for response in responses]
    return [sum(word[-1] in "02468" for word in one) / len(one) if one else 0.0 for one in words]


def falling(start: float) -> Callable[[float], float]:
    return lambda left: start * left


_CARTPOLE: dict[str, Any] = {"gae_lambda": 0.8, "gamma": 0.98, "ent_coef": 0.0}
_ACROBOT: dict[str, Any] = {"gae_lambda": 0.94, "gamma": 0.99, "ent_coef": 0.0}
_LANDER: dict[str, Any] = {"gae_lambda": 0.98, "gamma": 0.999, "ent_coef": 0.01}
_WIDE: dict[str, Any] = {"n_steps": 64, "batch_size": 256, "n_epochs": 4}
_QUICK: dict[str, Any] = {"n_steps": 32, "batch_size": 256, "n_epochs": 20, "clip_range": falling(0.2)}
SB3: dict[tuple[str, str], tuple[int, int, dict[str, Any]]] = {
    ("CartPole-v1", "zoo"): (8, 100_000, {**_CARTPOLE, **_QUICK, "learning_rate": falling(0.001)}),
    ("CartPole-v1", "wide"): (32, 163_840, {**_CARTPOLE, **_WIDE, "learning_rate": falling(0.002)}),
    ("Acrobot-v1", "zoo"): (16, 300_000, {**_ACROBOT, "n_steps": 256, "n_epochs": 4}),
    ("Acrobot-v1", "wide"): (32, 300_000, {**_ACROBOT, **_WIDE, "learning_rate": falling(0.001)}),
    ("LunarLander-v3", "zoo"): (16, 1_000_000, {**_LANDER, "n_steps": 1024, "batch_size": 64, "n_epochs": 4}),
    ("LunarLander-v3", "wide"): (32, 1_000_000, {**_LANDER, **_WIDE, "learning_rate": falling(0.001)}),
    ("HalfCheetah-v5", "sac"): (1, 10_000, {"batch_size": 256, "learning_starts": 1000}),
    ("LunarLander-v3", "dqn"): (1, 10_000, {
        "batch_size": 128, "learning_starts": 1000, "gradient_steps": 4, "learning_rate": 6.3e-4,
        "buffer_size": 50_000, "target_update_interval": 250, "policy_kwargs": {"net_arch": [256, 256]},
    }),
}  # fmt: skip
"""Environments, steps and arguments; of PPO Acrobot's observations are normalised."""


def sb3(said: argparse.Namespace) -> dict[str, Any]:
    import torch
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    count, steps, arguments = SB3[said.task, said.case]
    torch.set_num_threads(1)  # for networks this small more threads are slower
    environments: Any = make_vec_env(said.task, n_envs=count, seed=said.seed)
    if said.task == "Acrobot-v1":
        environments = VecNormalize(environments, gamma=arguments["gamma"])
    kind = getattr(import_module(said.library), said.case.upper() if said.case in ("sac", "dqn") else "PPO")
    model = kind("MlpPolicy", environments, seed=said.seed, device="cpu", **arguments)
    solved: dict[str, float | None] = {"solved_s": None, "solved_at": None}
    began_s = time.perf_counter()

    def look(_locals: dict[str, Any], _globals: dict[str, Any]) -> bool:
        if model.num_timesteps % (count * arguments.get("n_steps", 64)) == 0 and solved["solved_s"] is None:
            returns = [episode["r"] for episode in model.ep_info_buffer or ()]
            if len(returns) == WINDOW and sum(returns) / WINDOW >= said.target:
                solved.update(solved_s=time.perf_counter() - began_s, solved_at=time.time())
        return True

    model.learn(steps, callback=look)
    return {"steps": model.num_timesteps, "seconds": time.perf_counter() - began_s, **solved}


_NORMALISED: dict[str, Any] = {"normalize_input": True, "normalize_returns": True, "reward_scale": 1.0}
APPO_TASKS: dict[str, dict[str, Any]] = {
    "CartPole-v1": {
        "train_for_env_steps": 150_000, "num_epochs": 6, "learning_rate": 0.002,
        "gamma": 0.98, "gae_lambda": 0.8, "exploration_loss_coeff": 0.0,
    },
    "Acrobot-v1": {
        "train_for_env_steps": 300_000, "num_epochs": 4, "learning_rate": 0.001,
        "gamma": 0.99, "gae_lambda": 0.94, "exploration_loss_coeff": 0.0, **_NORMALISED,
    },
    "LunarLander-v3": {
        "train_for_env_steps": 1_000_000, "num_epochs": 4, "learning_rate": 0.001,
        "gamma": 0.999, "gae_lambda": 0.98, "exploration_loss_coeff": 0.01, **_NORMALISED,
    },
}  # fmt: skip
"""What differs: the discounts, epochs and rates that ours has."""
NAMES = {"LunarLander-v3": "LunarLander-v2"}
"""As the Gymnasium that Sample Factory asks for calls it."""
APPO: dict[str, Any] = {
    "algo": "APPO", "experiment": "peer", "device": "cpu", "stats_avg": WINDOW,
    "num_workers": 2, "num_envs_per_worker": 16, "worker_num_splits": 2, "rollout": 32,
    "recurrence": 1, "use_rnn": False, "with_vtrace": False, "batch_size": 256,
    "num_batches_per_epoch": 4, "shuffle_minibatches": True, "value_bootstrap": True,
    "encoder_mlp_layers": "64 64", "nonlinearity": "tanh",
    "normalize_input": False, "normalize_returns": False, "reward_scale": 0.1,
    "ppo_clip_ratio": 0.2, "ppo_clip_value": 1000.0, "max_grad_norm": 0.5,
    "decorrelate_envs_on_one_worker": False, "decorrelate_experience_max_seconds": 0,
}  # fmt: skip


def _make_environment(name: str, *_: Any, render_mode: str | None = None, **__: Any) -> Any:
    import gymnasium

    return gymnasium.make(NAMES.get(name, name), render_mode=render_mode)


class Clock:
    """Notes experience, steps and episodes as Sample Factory's runner reports them."""

    def __init__(self, target: float) -> None:
        self._target, self._began_s = target, 0.0
        self.result: dict[str, Any] = {"steps": 0, "seconds": 0.0, "solved_s": None, "solved_at": None}

    def played(self, _runner: Any, _message: dict[str, Any], _policy: int) -> None:
        self._began_s = self._began_s or time.perf_counter()

    def trained(self, runner: Any, message: dict[str, Any], policy: int) -> None:
        seconds = time.perf_counter() - self._began_s if self._began_s else 0.0
        self.result |= {"steps": message["learner_env_steps"], "seconds": seconds}
        returns = runner.policy_avg_stats.get("reward", [()])[policy]
        reached = len(returns) == WINDOW and sum(returns) / WINDOW >= self._target
        if reached and self.result["solved_s"] is None:
            self.result |= {"solved_s": seconds, "solved_at": time.time()}


def appo(said: argparse.Namespace) -> dict[str, Any]:
    from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args  # type: ignore[import-not-found]
    from sample_factory.envs.env_utils import register_env  # type: ignore[import-not-found]
    from sample_factory.train import make_runner  # type: ignore[import-not-found]

    register_env(said.task, _make_environment)
    clock = Clock(said.target)
    with tempfile.TemporaryDirectory() as folder:
        options = APPO | APPO_TASKS[said.task] | {"env": said.task, "seed": said.seed, "train_dir": folder}
        words = [text for name, value in options.items() for text in (f"--{name}", *str(value).split())]
        parser, _ = parse_sf_args(words)
        _, runner = make_runner(parse_full_cfg(parser, words))
        runner.register_episodic_stats_handler(clock.played)
        runner.policy_msg_handlers["learner_env_steps"].append(clock.trained)
        runner.init()
        runner.run()
    return clock.result


def grpo(said: argparse.Namespace) -> dict[str, Any]:
    """Train GRPO as TRL comes, but in float32 and without what saves memory for time."""
    import torch
    from datasets import load_dataset
    from transformers import TrainerCallback
    from transformers.utils import logging
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found, unused-ignore]

    torch.set_num_threads(said.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    counts = {"tokens": 0, "seconds": 0.0, "cpu_seconds": 0.0}

    def scored(
        prompts: Sequence[Any], completions: Sequence[str], completion_ids: Sequence[Any], **_: Any
    ) -> list[float]:
        counts["tokens"] += sum(map(len, completion_ids))
        return liked(prompts, completions)

    class Warm(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == said.warm:
                counts.update(tokens=0, seconds=-time.perf_counter(), cpu_seconds=-time.process_time())

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder, max_steps=said.warm + said.batches, seed=said.seed, logging_steps=10**6,
            per_device_train_batch_size=128, num_generations=8, max_completion_length=32,
            lr_scheduler_type="constant", gradient_checkpointing=False, bf16=False, use_cpu=True,
            disable_tqdm=True, save_strategy="no", report_to="none",
        )  # fmt: skip
        data = str(said.folder / "prompts.jsonl")
        prompts = load_dataset("json", data_files=data, split="train", cache_dir=folder)
        model = str(said.folder / "model")
        trainer = GRPOTrainer(
            model, reward_funcs=scored, args=config, train_dataset=prompts, callbacks=[Warm()]
        )
        trainer.train()
    counts["seconds"] += time.perf_counter()
    counts["cpu_seconds"] += time.process_time()
    return counts


def serve(said: argparse.Namespace) -> None:
    """Answer POST /act {"observation": [4 numbers]} with {"action": 0 or 1}, drawn; never trained."""
    import numpy as np
    import torch
    import uvicorn
    from fastapi import FastAPI
    from pydantic import BaseModel
    from stable_baselines3 import PPO

    class Asked(BaseModel):
        observation: list[float]

    torch.set_num_threads(1)
    policy = PPO("MlpPolicy", "CartPole-v1", device="cpu").policy

    async def act(asked: Asked) -> dict[str, int]:  # in the event loop's thread: another would take longer
        action, _ = policy.predict(np.asarray(asked.observation, np.float32))
        return {"action": int(action)}

    app = FastAPI()
    app.add_api_route("/act", act, methods=["POST"])
    uvicorn.run(app, host="127.0.0.1", port=said.port, log_level="warning", access_log=False)


def main() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(required=True)
    for function in (sb3, appo, grpo, serve):
        command = commands.add_parser(function.__name__)
        command.set_defaults(function=function)
        if function is sb3:
            command.add_argument("--library", default="stable_baselines3")
            command.add_argument("case", choices={case for _, case in SB3})
        if function in (sb3, appo):
            command.add_argument("task", choices={task for task, _ in SB3})
            command.add_argument("--target", type=float, required=True)
        if function is grpo:
            command.add_argument("folder", type=Path)
            for name, value in (("threads", 2), ("warm", 10), ("batches", 100)):
                command.add_argument(f"--{name}", type=int, default=value)
        if function is serve:
            command.add_argument("port", type=int)
        command.add_argument("--seed", type=int, default=0)
    said = parser.parse_args()
    if (result := said.function(said)) is not None:
        sys.stdout.write("\n" + json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
