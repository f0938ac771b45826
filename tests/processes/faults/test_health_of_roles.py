"""`/healthz` of a role turns red when its own progress stops, says why, and turns green when it goes on."""

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import redis

from penstock.broker.log import keys
from tests.support.run import harness
from tests.support.run.actor_run import Plan, ScriptedLearner
from tests.support.run.harness import BrokerProcess, eventually

PATIENCE_S = 60.0

SLEEPS = """
import os, time, gymnasium
from gymnasium.envs.classic_control import CartPoleEnv
def sleep(where):
    while os.path.exists(os.environ.get("SLEEP_WHILE", "never") + "." + where):
        time.sleep(0.01)
class Sleeps(CartPoleEnv):
    def __init__(self, **words):
        sleep("make")
        super().__init__(**words)
    def reset(self, **words):
        sleep("reset")
        return super().reset(**words)
    def step(self, action):
        sleep("step")
        return super().step(action)
gymnasium.register("Sleeps-v0", Sleeps, max_episode_steps=500)
"""
DOING = {"make": "made", "reset": "reset", "step": "stepped"}

Start = Callable[..., BrokerProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    names = map(str, itertools.count())
    with ExitStack() as stack:
        yield lambda *words, **environment: stack.enter_context(
            harness.service(tmp_path, *words, name=next(names), **environment)
        )


def becomes(process: BrokerProcess, status: int, name: str = "") -> str:
    """Wait until `/healthz` has that status, for what is named; its text.

    On a slow machine another part may be late before.
    """
    told: list[str] = []

    def has_become() -> bool:
        code, text = process.get("/healthz")
        told.append(text)
        return code == status and text.startswith(name)

    eventually(has_become, f"health {status} {name}", PATIENCE_S)
    return told[-1]


@pytest.fixture
def learner(redis_url: str, importable: Path) -> ScriptedLearner:
    """Of a run whose environments sleep while a file of their name is there."""
    (importable / "sleeping.py").write_text(SLEEPS)
    learner = ScriptedLearner(redis_url, Plan(environment={"id": "sleeping:Sleeps-v0", "count": 1}))
    learner.publish()
    return learner


def start_sleeping(start: Start, broker: BrokerProcess, folder: Path) -> BrokerProcess:
    """An actor of that run."""
    told = ("--set", "actor.stall_timeout_s=1", "--set", 'actor.allow_modules=["sleeping"]')
    words = ("actor", "--broker", broker.address, "--actor-id", "a", *told)
    return start(*words, SLEEP_WHILE=str(folder / "asleep"))


@pytest.mark.promise("healthz-role-turns-red")
def test_an_actor_whose_environment_hangs_turns_unhealthy(
    learner: ScriptedLearner, broker: BrokerProcess, start: Start, tmp_path: Path
) -> None:
    asleep = tmp_path / "asleep.step"
    actor = start_sleeping(start, broker, tmp_path)
    eventually(lambda: learner.learn() >= 2, "experience", PATIENCE_S)
    assert actor.get("/healthz") == (200, "ok\n")
    asleep.touch()
    eventually(lambda: learner.learn() < 0 or actor.get("/healthz")[0] == 503, "red health", PATIENCE_S)
    assert actor.get("/healthz")[1].startswith("environment: no progress for ")
    asleep.unlink()
    becomes(actor, 200)


def _says(actor: BrokerProcess, doing: str) -> bool:
    code, text = actor.get("/healthz")
    return code == 503 and text.startswith("environment: no progress for ") and f"are being {doing}" in text


def _has_come(learner: ScriptedLearner, known: int) -> bool:
    return learner.learn() > known


@pytest.mark.promise("healthz-role-turns-red", "actor-makes-environments-session")
def test_an_actor_whose_environment_never_starts_turns_unhealthy(
    redis_url: str, learner: ScriptedLearner, broker: BrokerProcess, start: Start, tmp_path: Path
) -> None:
    # Credit comes while the reset hangs, so that the first step waits for nothing.
    for places in (["make"], ["reset", "step"]):
        for where in places:
            (tmp_path / f"asleep.{where}").touch()
        before = learner.learn()
        actor = start_sleeping(start, broker, tmp_path)
        eventually(actor.endpoint_file.exists, "the actor", PATIENCE_S)
        for where in places:
            eventually(
                partial(_says, actor, DOING[where]), f"health says that it is being {where}", PATIENCE_S
            )
            with redis.Redis.from_url(redis_url) as client:
                assert (client.zcard(keys.OPEN) == 0) == (where == "make")
            assert learner.learn() == before
            (tmp_path / f"asleep.{where}").unlink()
        becomes(actor, 200)
        eventually(partial(_has_come, learner, before), "experience", PATIENCE_S)
        actor.process.terminate()  # in order, so that nothing of it is still on its way
        actor.process.wait(PATIENCE_S)


@pytest.mark.promise("healthz-role-turns-red")
def test_an_actor_without_new_weights_turns_unhealthy(
    redis_url: str, broker: BrokerProcess, start: Start
) -> None:
    learner = ScriptedLearner(redis_url, Plan())
    version = learner.publish().version
    redis.Redis.from_url(redis_url).unlink(keys.weights(version, 0))
    told = ("--set", "actor.stall_timeout_s=1")
    actor = start("actor", "--broker", broker.address, "--actor-id", "a", *told)
    eventually(lambda: actor.endpoint_file.exists(), "the actor", PATIENCE_S)
    text = becomes(actor, 503, "weights: no progress for ")
    assert f"version {version} is published, 0 is held here" in text
    learner.publish()
    becomes(actor, 200)
    eventually(lambda: learner.read() > 0, "experience", PATIENCE_S)


@pytest.mark.promise("healthz-role-turns-red")
def test_an_embedded_redis_that_does_not_answer_turns_unhealthy(start: Start, short_folder: Path) -> None:
    service = start(
        "redis", "--socket", str(short_folder / "r.sock"), "--dir", str(short_folder / "data"),
        "--set", "broker.stall_timeout_s=6",
    )  # fmt: skip
    eventually(lambda: service.endpoint_file.exists() and service.is_ready(), "readiness", PATIENCE_S)
    server = service.endpoint.server_pid
    assert server is not None
    os.kill(server, signal.SIGSTOP)
    assert becomes(service, 503).startswith("redis-server: no progress for ")
    os.kill(server, signal.SIGCONT)
    becomes(service, 200)
