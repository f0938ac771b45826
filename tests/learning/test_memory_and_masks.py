"""A memory is learned where it is needed, and masks make the best of what is allowed: small forms of the proofs."""

import threading
from typing import Any

import numpy as np
import pytest
import torch

from actor import run as actor_run
from actor.evaluation import play
from benchmarks.staleness import Experience
from learner.batch import assemble, check_meaning
from learner.model import make_model
from penstock.policy.weights import encode, load_into
from penstock.runtime.settings import load
from penstock.wire.fragment import Fragment, check
from workloads.control.defaults import for_environment

TASKS = "workloads.control.tasks"
EPISODES = 64


def learned(task: str, steps: int, seed: int, **sections: Any) -> float:
    """Mean return of 64 deterministic episodes after so many steps with the task's defaults."""
    torch.set_num_threads(1)
    over = {"run": "small", "seed": seed, "environment": {"id": task}, "actor": {"allow_modules": [TASKS]}}
    settings = load([for_environment(task), over, {"learner": {"device": "cpu"}}, sections])
    model = make_model(settings)
    run = actor_run.read(model.specification, settings.actor)
    experience, done = Experience(run, seed), 0
    while done < steps:
        weights, fragments = encode(model.algorithm.published_modules()["default"]), list[Fragment]()
        while not model.algorithm.take([fragment.header for fragment in fragments]):
            fragments.append(experience.fragment(weights, model.algorithm.updates))
            check(fragments[-1], model.specification.schema, settings.run)
            check_meaning(fragments[-1].header, fragments[-1].arrays())
        batch = assemble([(fragment.header, fragment.arrays()) for fragment in fragments], model.device)
        assert model.algorithm.update(batch, progress=done / steps).applied
        done += int(batch.valid.sum())
    policy = run.make_policy(0).policy
    load_into(policy, encode(model.algorithm.published_modules()["default"]))
    stepper = run.make_environment(run.environment, EPISODES, 0)
    played = play(stepper, policy, episodes=EPISODES, seed=10**6, deterministic=True, stop=threading.Event())
    return float(np.mean([episode.episode_return for episode in played or ()]))


RECALL, MENU = f"{TASKS}:Recall-v0", f"{TASKS}:Menu-v0"
SHORT = {
    "environment": {"kwargs": {"cues": 2, "delay": 4}},
    "actor": {"unroll_length": 16},
    "algorithm": {"batch_steps": 1024},
}


@pytest.mark.parametrize(
    "policy", [{"recurrent": "gru"}, {"recurrent": "lstm"}, {"recurrent": "none", "frame_stack": 6}], ids=str
)
def test_a_policy_that_remembers_recalls_the_cue(policy: dict[str, Any]) -> None:
    """At least 95% of the optimum, 1: a cue of two, asked for after two to four steps."""
    assert learned(RECALL, 20_000, 1, policy=policy, **SHORT) >= 0.95


def test_a_policy_that_cannot_remember_stays_at_chance() -> None:
    """A quarter, give or take four standard deviations of 64 episodes: no return can be better."""
    found = learned(RECALL, 6_000, 1, policy={"recurrent": "none"}, algorithm={"batch_steps": 1024})
    assert abs(found - 0.25) <= 4 * (0.25 * 0.75 / EPISODES) ** 0.5


def test_masks_make_the_best_of_every_menu() -> None:
    """At least 95% of the optimum, 8.19; who does not see them gets little more than nothing."""
    assert learned(MENU, 8_000, 2) >= 7.78
    assert learned(MENU, 4_000, 2, environment={"mask_key": ""}) <= 2.0
