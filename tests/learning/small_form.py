"""The small form of a learning proof: actor, batches and algorithm in one process, some seconds of steps."""

import threading
from typing import Any

import numpy as np
import torch

from benchmarks.train import Experience
from penstock.actor import specification as actor_run
from penstock.actor.evaluator import Playing, play_wave
from penstock.config.settings import Settings, load
from penstock.learner.batch import assemble, check_meaning
from penstock.learner.model import make_model
from penstock.policy.weights import encode
from penstock.protocol.fragment import Fragment, check
from penstock.workloads.control.defaults import for_environment

EPISODES, _FIRST_SEED = 64, 1_000_000


def settings_of(task: str, seed: int, total_steps: int, **sections: Any) -> Settings:
    """The defaults of `penstock train` for that environment, with `sections` laid over them."""
    module = task.rpartition(":")[0]
    over = {
        "run": "small-form",
        "seed": seed,
        "environment": {"id": task},
        "actor": {"allow_modules": [module] if module else []},
        "learner": {"device": "cpu", "total_steps": total_steps},
    }
    algorithm = sections.get("algorithm", {}).get("name", "ppo")
    return load([for_environment(task, algorithm), over, sections])


def learned(settings: Settings) -> float:
    """Mean return of 64 deterministic episodes after `learner.total_steps` steps."""
    run, policy = trained(settings)
    return _evaluate(run, encode(policy))


def trained(settings: Settings) -> tuple[actor_run.Run, Any]:
    """The run and its policy after `learner.total_steps` steps.

    The experience never lags.
    """
    torch.set_num_threads(1)
    model = make_model(settings)
    run = actor_run.read(model.specification, settings.actor)
    algorithm, experience = model.algorithm, Experience(run, settings.seed)
    total, steps = settings.learner.total_steps or 0, 0
    while steps < total:
        weights, fragments = encode(algorithm.published_modules()["default"]), list[Fragment]()
        while not algorithm.makes_batch(len(fragments), sum(one.header.charge for one in fragments)):
            fragments.append(experience.fragment(weights, algorithm.updates))
            check(fragments[-1], model.specification.schema, settings.run)
            check_meaning(fragments[-1].header, fragments[-1].arrays())
        batch = assemble([(fragment.header, fragment.arrays()) for fragment in fragments], model.device)
        update = algorithm.update(batch, progress=steps / total)
        assert update.applied, update.reason
        steps += update.steps
    return run, algorithm.published_modules()["default"]


def _evaluate(run: actor_run.Run, weights: bytes) -> float:
    policy = run.make_policy(0).policy
    policy.load(weights)
    stepper = run.make_environment(run.environment, EPISODES, _FIRST_SEED)
    try:
        played = play_wave(stepper, policy, _FIRST_SEED, Playing(deterministic=True, stop=threading.Event()))
    finally:
        stepper.close()
    return float(np.mean([episode.episode_return for episode in played or ()]))
