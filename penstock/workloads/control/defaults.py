"""Default settings that are known to learn, by environment and algorithm.

File, environment variables and flags override them.
"""

from typing import Any, Final

import gymnasium

from penstock.config.settings import merge
from penstock.workloads.control import SHIPPED, TASKS

# ---- IMPALA and REINFORCE: smaller batches than PPO, since each is one gradient step.

GENERAL: Final = ""


def _policy_gradient(
    batch_steps: int, learning_rate: float, *, scaled: bool = True, **numbers: Any
) -> dict[str, Any]:
    """Return the section of an algorithm. scaled: whether rewards are scaled."""
    return {
        "batch_steps": batch_steps, "entropy_coefficient": 0.01, "learning_rate": learning_rate,
        "learning_rate_schedule": "linear", **({"scale_rewards": True} if scaled else {}), **numbers,
    }  # fmt: skip


_CARTPOLE: Final = {"actor": {"count": 2, "unroll_length": 32}, "learner": {"total_steps": 300_000}}
IMPALA: Final[dict[str, dict[str, Any]]] = {
    GENERAL: {
        "actor": {"unroll_length": 32},
        "algorithm": _policy_gradient(1024, 1e-3, normalise_advantages=True),
    },
    "CartPole": {
        **_CARTPOLE,
        "algorithm": _policy_gradient(512, 2e-3, discount=0.98, normalise_advantages=True),
    },
}
REINFORCE: Final[dict[str, dict[str, Any]]] = {
    GENERAL: {"algorithm": _policy_gradient(2048, 1e-3)},
    "CartPole": {**_CARTPOLE, "algorithm": _policy_gradient(512, 2e-3, scaled=False, discount=0.98)},
}


# ---- Settings with which DQN and SAC are known to learn, by environment family.


def _replay(
    envs: int, unroll: int, steps: int, numbers: dict[str, Any], *, width: int = 256, **learner: Any
) -> dict[str, Any]:
    """Return the settings of a run that replays experience, with one actor. width: of both hidden layers."""
    return {
        "environment": {"count": envs},
        "actor": {"count": 1, "unroll_length": unroll},
        "policy": {"hidden_sizes": [width, width], "activation": "relu"},
        "algorithm": numbers,
        "learner": {"total_steps": steps, **learner},
    }


DQN: Final[dict[str, dict[str, Any]]] = {
    GENERAL: _replay(8, 16, 200_000, {
        "learning_rate": 5e-4, "replay_ratio": 0.5, "n_step": 3, "target_period": 500,
        "epsilon_fraction": 0.15,
    }),
    "CartPole": _replay(8, 16, 60_000, {
        "learning_rate": 1e-3, "batch_size": 64, "replay_ratio": 0.5, "target_period": 100,
        "epsilon_fraction": 0.2, "epsilon_final": 0.04,
    }),
    "MountainCar": _replay(8, 16, 120_000, {
        "learning_rate": 4e-3, "learning_rate_schedule": "linear", "batch_size": 128, "replay_ratio": 0.5,
        "n_step": 3, "discount": 0.98, "capacity": 50_000, "target_period": 300, "epsilon_fraction": 0.2,
        "epsilon_final": 0.07,
    }),
    "LunarLander": _replay(8, 16, 200_000, {
        "learning_rate": 6.3e-4, "learning_rate_schedule": "linear", "batch_size": 128,
        "replay_ratio": 0.5, "n_step": 3, "capacity": 50_000, "target_period": 250,
        "epsilon_fraction": 0.12, "epsilon_final": 0.05,
    }),
}  # fmt: skip

_SAC: Final[dict[str, Any]] = {
    "learning_starts": 5_000, "batch_size": 128, "error_steps": 512, "capacity": 300_000,
}  # fmt: skip
SAC: Final[dict[str, dict[str, Any]]] = {
    GENERAL: _replay(4, 16, 300_000, _SAC),
    "Pendulum": _replay(4, 8, 20_000, {
        "learning_rate": 1e-3, "batch_size": 128, "critic_hidden_sizes": [128, 128],
        "learning_starts": 500, "error_steps": 128,
    }, width=128, target_return=-180.0),
    "HalfCheetah": _replay(4, 16, 300_000, _SAC, target_return=4000.0),
    "Hopper": _replay(4, 16, 200_000, _SAC, target_return=1500.0),
}  # fmt: skip


_ATARI: Final = "ALE"
"""Namespace of Atari games, which share one family of settings."""


def _task(
    envs: int,
    unroll: int,
    steps: int,
    *,
    actors: int | None = None,
    policy: dict[str, Any] | None = None,
    target: float | None = None,
    mask: str = "",
) -> dict[str, Any]:
    """Return the settings of a family. steps: in all. target: mean return that counts as solved."""
    return {
        "environment": {"count": envs} | ({"mask_key": mask} if mask else {}),
        "actor": {"unroll_length": unroll} | ({"count": actors} if actors else {}),
        "learner": {"total_steps": steps} | ({} if target is None else {"target_return": target}),
    } | ({"policy": policy} if policy else {})


_NORMAL: Final = {"normalise_observations": True}
_TASKS: Final[dict[str, dict[str, Any]]] = {
    GENERAL: _task(16, 64, 1_000_000, actors=2, policy=_NORMAL),
    _ATARI: _task(
        8, 32, 10_000_000, actors=1, policy={"activation": "relu", "hidden_sizes": [], "shared_trunk": True}
    ),
    # One actor makes more steps than PPO's learner can use, on any number of cores. Its fragment is a whole
    # batch of PPO, since the cost of a fragment for actor, broker and Redis hardly depends on its size.
    "CartPole": _task(16, 64, 150_000, actors=1),
    "Acrobot": _task(8, 128, 500_000, policy=_NORMAL),
    "Pendulum": _task(8, 64, 300_000, target=-250.0),
    "LunarLander": _task(16, 64, 1_000_000, policy=_NORMAL),
    "HalfCheetah": _task(16, 64, 1_000_000, policy=_NORMAL, target=1500.0),
    "Hopper": _task(16, 64, 1_000_000, policy=_NORMAL, target=1500.0),
    "BipedalWalker": _task(16, 128, 5_000_000, policy=_NORMAL, target=200.0),
    "CarRacing": _task(
        8, 32, 2_000_000, policy={"activation": "relu", "hidden_sizes": [], "shared_trunk": True}
    ),
    "Catch": _task(16, 32, 200_000, policy={"hidden_sizes": [], "shared_trunk": True}),
    "Courier": _task(16, 32, 200_000, policy=_NORMAL),
    "Recall": _task(16, 32, 300_000, policy={
        "recurrent": "gru", "recurrent_size": 32, "hidden_sizes": [32], "shared_trunk": True,
    }),
    "Menu": _task(16, 32, 100_000, mask="action_mask"),
}  # fmt: skip


def _ppo(
    batch_steps: int,
    epochs: int,
    minibatches: int,
    learning_rate: float,
    *,
    falls: bool = True,
    **numbers: Any,
) -> dict[str, Any]:
    """Return the section of PPO. falls: whether its learning rate falls to 0."""
    return {
        "batch_steps": batch_steps, "epochs": epochs, "minibatches": minibatches,
        "learning_rate": learning_rate, **({"learning_rate_schedule": "linear"} if falls else {}), **numbers,
    }  # fmt: skip


_USUAL: Final[dict[str, Any]] = {"discount": 0.99, "gae_lambda": 0.95}
_TRIES: Final[dict[str, Any]] = {"entropy_coefficient": 0.01}
_SCALED: Final[dict[str, Any]] = {"scale_rewards": True}
_PPO: Final[dict[str, dict[str, Any]]] = {
    GENERAL: _ppo(4096, 6, 16, 5e-4, **_SCALED),
    _ATARI: _ppo(1024, 4, 4, 2.5e-4, clip_range=0.1, **_USUAL, **_TRIES),
    "CartPole": _ppo(1024, 6, 4, 2e-3, discount=0.98, gae_lambda=0.8),
    "Acrobot": _ppo(2048, 4, 8, 1e-3, discount=0.99, gae_lambda=0.94, **_SCALED),
    "Pendulum": _ppo(2048, 10, 8, 1e-3, falls=False, discount=0.9, gae_lambda=0.95, **_SCALED),
    "LunarLander": _ppo(4096, 6, 16, 1e-3, discount=0.999, gae_lambda=0.98, **_TRIES, **_SCALED),
    "HalfCheetah": _ppo(4096, 10, 32, 3e-4, **_USUAL, **_SCALED),
    "Hopper": _ppo(2048, 10, 32, 3e-4, **_USUAL, **_SCALED),
    "BipedalWalker": _ppo(8192, 10, 64, 3e-4, clip_range=0.18, **_USUAL, **_SCALED),
    "CarRacing": _ppo(1024, 4, 4, 2.5e-4, **_USUAL, **_TRIES, **_SCALED),
    "Catch": _ppo(1024, 4, 4, 5e-4, **_USUAL, **_TRIES),
    "Courier": _ppo(1024, 6, 4, 2e-3, **_USUAL, **_TRIES),
    "Recall": _ppo(2048, 4, 4, 3e-3, **_USUAL, **_TRIES),
    "Menu": _ppo(1024, 6, 4, 2e-3, discount=0.9, gae_lambda=0.8, **_TRIES),
}

_ALGORITHMS: Final[dict[str, dict[str, dict[str, Any]]]] = {
    "ppo": {family: {"algorithm": section} for family, section in _PPO.items()},
    "impala": IMPALA,
    "reinforce": REINFORCE,
    "random": {GENERAL: {"evaluation": {"deterministic": False}}},  # the most likely action is not random
}
"""Settings that override those of the task."""
_OF_ATARI: Final[dict[str, Any]] = {
    "environment": {"atari": {}, "reward": [{"clip": [-1.0, 1.0]}]},
    "policy": {"frame_stack": 4},
}
"""Observations and rewards of every algorithm (Mnih et al. 2015)."""
_LAYERS: Final = {"dqn": DQN, "sac": SAC}
"""Algorithms whose networks, fragments and numbers of actors differ, too."""


def for_environment(environment_id: str, algorithm: str) -> dict[str, Any]:
    """Return the settings of the id's family (`CartPole` of `CartPole-v1`), else general ones.

    Only Gymnasium's ids, Atari games and the tasks of this package have families: another environment of the
    same name may differ in everything.
    """
    module, _, name = environment_id.rpartition(":")
    if name.startswith(f"{_ATARI}/") and module in ("", "ale_py"):
        return merge(_of_family(_ATARI, algorithm), _OF_ATARI)
    is_known = name in SHIPPED if module in ("", TASKS) else False
    if not module and not is_known:
        registered = gymnasium.registry.get(name)
        is_known = registered is not None and str(registered.entry_point).startswith("gymnasium.envs.")
    return _of_family(name.partition("-v")[0] if is_known else GENERAL, algorithm)


def _of_family(family: str, algorithm: str) -> dict[str, Any]:
    if algorithm in _LAYERS:
        layers = _LAYERS[algorithm]
        return layers.get(family, layers[GENERAL])
    known = _ALGORITHMS.get(algorithm, {})
    return merge(_TASKS.get(family, _TASKS[GENERAL]), known.get(family, known.get(GENERAL, {})))
