"""Whole runs that cannot go on end non-zero, with the cause on the last line; some faults they outlive."""

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from penstock.launch.run.supervisor import MAX_FAILURES
from penstock.runtime.exit import EXIT_USAGE
from penstock.runtime.health import ENDPOINT_VARIABLE
from tests.support.network.proxy import Proxy
from tests.support.run import harness
from tests.support.run.harness import LONG, OFTEN, Training, trainings
from tests.support.storage.small_disk import KINDS, SmallDisk, can_mount, small_disk

pytestmark = pytest.mark.timeout(900)
PATIENCE_S = 600.0

ENDLESS = ("CartPole-v1", *LONG, "--actors", "1")

FALLS = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv
class Falls(CartPoleEnv):
    left = 300
    def step(self, action):
        self.left -= 1
        if self.left <= 0:
            raise RuntimeError("the simulator has crashed")
        return super().step(action)
gymnasium.register("Falls-v0", Falls, max_episode_steps=500, reward_threshold=475)
"""

OTHER_FORM = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv
class OtherForm(CartPoleEnv):
    def step(self, action):
        return super().step(action)[:4]
gymnasium.register("OtherForm-v0", OtherForm, max_episode_steps=500)
"""

LEAVES = f"""
import os, pathlib
def leave():
    lives = pathlib.Path("lives-" + pathlib.Path(os.environ["{ENDPOINT_VARIABLE}"]).stem)
    with lives.open("ab") as file:
        file.write(b".")
    os._exit(0)
"""


@pytest.fixture
def start(tmp_path: Path, disk: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Training]]:
    """Start a run in `tmp_path/run`; nothing of it is left when its disk goes."""
    monkeypatch.setattr(harness, "PATIENCE_S", PATIENCE_S)
    with trainings(tmp_path / "run") as starter:
        yield starter


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str, str, Callable[[], int | None]], SmallDisk]]:
    with ExitStack() as stack:

        def make(kind: str, name: str, pid: Callable[[], int | None]) -> SmallDisk:
            folder = tmp_path / "run" / name
            folder.mkdir(parents=True)
            return stack.enter_context(small_disk(kind, folder, pid))

        yield make


def ending(training: Training) -> str:
    """The last line of a run that must fail; the summary says the same."""
    _, err = training.process.communicate(timeout=PATIENCE_S)
    code = training.process.returncode
    last = err.strip().splitlines()[-1]
    assert code != 0, err
    assert training.summary()["failure"] == last
    return last


def test_a_loss_that_is_not_a_number_ends_the_run(start: Callable[..., Training]) -> None:
    too_far = ("--set", "algorithm.learning_rate=1e9", "--set", "policy.activation=relu")
    training = start(*ENDLESS, *too_far)
    last = ending(training)
    assert training.process.returncode == 1
    assert "3 updates in a row were not finite" in last
    assert list((training.run_dir / "evidence").iterdir())


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_under_the_checkpoints_ends_the_run(
    kind: str, start: Callable[..., Training], disk: Callable[..., SmallDisk]
) -> None:
    running: list[Training] = []
    small = disk(kind, "checkpoints", lambda: running[0].pids().get("learner") if running else None)
    training = start(*ENDLESS, *OFTEN)
    running.append(training)
    checkpoints = training.run_dir / "checkpoints"
    training.until(lambda: list(checkpoints.glob("0*/manifest.json")) != [])
    small.fill(0 if kind == "tmpfs" else -1)  # a file as large as before must not pass
    last = ending(training)
    assert "learner cannot write" in last
    assert "checkpoints" in last
    assert not list(checkpoints.glob(".tmp-*"))
    if kind == "tmpfs":
        small.free()
    again = start("--resume", *OFTEN)
    again.until_steps(2_000)
    again.process.send_signal(signal.SIGTERM)
    code, _, err = again.end()
    assert code == 130, err
    assert again.summary()["ledger"]["balanced"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("durability", "words"), [("fsync_1s", "MISCONF"), ("fsync", "redis-server died (exit 1)")]
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_under_the_append_only_file_ends_the_run(
    kind: str, durability: str, words: str, start: Callable[..., Training], disk: Callable[..., SmallDisk]
) -> None:
    running: list[Training] = []
    small = disk(kind, "redis", lambda: running[0].pids().get("redis") if running else None)
    training = start(*ENDLESS, "--set", "broker.redis_wait_s=5", "--set", f"broker.durability={durability}")
    running.append(training)
    training.until_steps(1_000)
    small.fill(64 * 1024)
    last = ending(training)
    assert words in last or "cannot write in" in last, last
    assert "No space left on device" in last or "File too large" in last or "make room" in last, last


@pytest.mark.slow
@pytest.mark.skipif(not can_mount(), reason="this user may not mount a tmpfs")
def test_a_run_on_a_full_disk_ends_with_the_cause(
    start: Callable[..., Training], disk: Callable[..., SmallDisk]
) -> None:
    small = disk("tmpfs", ".", lambda: None)
    training = start(*ENDLESS, *OFTEN, "--set", "broker.redis_wait_s=5")
    training.until_steps(1_000)
    small.fill(0)
    _, err = training.process.communicate(timeout=PATIENCE_S)
    assert training.process.returncode == 1, err
    last = err.strip().splitlines()[-1]
    assert last.startswith("cannot write in")
    assert "No space left on device" in last


@pytest.mark.slow
def test_actors_that_all_die_end_the_run(
    start: Callable[..., Training], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "falling.py").write_text(FALLS)
    monkeypatch.chdir(tmp_path)
    last = ending(start("falling:Falls-v0", *ENDLESS[1:]))
    assert re.search(r"actor-0 failed .*\(exit 1\): ", last)
    assert "the simulator has crashed" in last


def test_an_environment_that_exits_the_program_ends_the_run(
    start: Callable[..., Training], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaving = FALLS.replace('raise RuntimeError("the simulator has crashed")', "leave()") + LEAVES
    (tmp_path / "leaving.py").write_text(leaving.replace("Falls-v0", "Leaves-v0"))
    monkeypatch.chdir(tmp_path)
    last = ending(start("leaving:Leaves-v0", *ENDLESS[1:]))
    assert re.search(r"actor-0 failed .*\(exit 0\): it was not asked to end", last)
    assert (tmp_path / "lives-actor-0").stat().st_size == MAX_FAILURES


def kill_an_actor(training: Training) -> None:
    """And let the run come further three times."""
    pid = training.pids()["actor-0"]
    os.kill(pid, signal.SIGKILL)
    training.until(lambda: training.pids()["actor-0"] != pid)
    for _ in range(3):
        training.until_steps(training.steps() - training.began_steps + 1)


def test_an_environment_of_another_form_ends_the_run_at_its_first_step(
    start: Callable[..., Training], importable: Path
) -> None:
    (importable / "other_form.py").write_text(OTHER_FORM)
    training = start("other_form:OtherForm-v0", *LONG, "--actors", "1")
    last = ending(training)
    assert last.startswith("environment.id='other_form:OtherForm-v0': step returned tuple (array")
    assert "return (observation, reward, terminated, truncated, info)" in last
    assert training.process.returncode == EXIT_USAGE
    assert all(one["restarts"] == 0 for one in training.summary()["processes"])


def test_kills_with_progress_in_between_do_not_end_a_run(start: Callable[..., Training]) -> None:
    training = start(*ENDLESS)
    training.until_steps(1_000)
    for _ in range(MAX_FAILURES + 1):
        kill_an_actor(training)
    training.process.send_signal(signal.SIGTERM)
    code, _, err = training.end()
    assert code == 130, err
    assert "failure" not in training.summary()


@pytest.mark.slow
def test_an_environment_that_hangs_ends_the_run(
    start: Callable[..., Training], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = FALLS.replace('raise RuntimeError("the simulator has crashed")', "import time; time.sleep(3600)")
    (tmp_path / "hanging.py").write_text(hangs.replace("Falls-v0", "Hangs-v0"))
    monkeypatch.chdir(tmp_path)
    last = ending(start("hanging:Hangs-v0", *ENDLESS[1:], "--set", "learner.stall_timeout_s=20"))
    assert "no update for 20 s (learner.stall_timeout_s)" in last
    assert "1 rollout workers are connected" in last or "its environment stands still" in last


@pytest.mark.slow
def test_weights_that_never_reach_an_actor_end_the_run(start: Callable[..., Training]) -> None:
    training = start(
        *ENDLESS, "--set", "policy.hidden_sizes=[600, 600]", "--set", "learner.stall_timeout_s=25"
    )
    training.until_steps(2_000)
    endpoint = training.run_dir / "endpoints" / "broker.json"
    address = Path(json.loads(endpoint.read_text())["address"].removeprefix("unix:"))
    real = address.with_name("real.sock")
    address.rename(real)
    with Proxy(f"unix:{real}") as proxy:
        proxy.set(bytes_per_s=20_000)
        address.symlink_to(proxy.address.removeprefix("unix:"))
        os.kill(training.pids()["actor-0"], signal.SIGKILL)
        last = ending(training)
    assert "no update for 25 s (learner.stall_timeout_s)" in last
    assert "no actor acts with the newest weights: actor-0 acts with version 0" in last


SOLVES_S: Final = 2400.0
HANGS_NOW_AND_THEN: Final = """
import random, sys, threading, gymnasium
from gymnasium.envs.classic_control import CartPoleEnv
class Hangs(CartPoleEnv):
    def step(self, action):
        if "evaluation" not in sys.argv and random.random() < 0.001:
            threading.Event().wait()
        return super().step(action)
gymnasium.register("Hangs-v0", Hangs, max_episode_steps=500, reward_threshold=475)
"""


@pytest.mark.promise("run-solved-whose-environments")
@pytest.mark.slow
@pytest.mark.timeout(2700)
def test_a_run_whose_environments_hang_once_in_a_thousand_steps_solves(
    start: Callable[..., Training], importable: Path
) -> None:
    (importable / "hanging.py").write_text(HANGS_NOW_AND_THEN)
    training = start(
        "hanging:Hangs-v0", "--actors", "4", "--seed", "1",
        "--set", 'actor.allow_modules=["hanging"]', "--set", "actor.stall_timeout_s=1",
    )  # fmt: skip
    code, _, err = training.end(SOLVES_S)
    assert code == 0, err
    summary = training.summary()
    assert summary["solved"]
    assert summary["ledger"]["balanced"]
    restarts = [one["restarts"] for one in summary["processes"] if one["role"] == "actor"]
    assert len(restarts) == 4
    assert all(restarts)
