"""A real run seen from outside, by `penstock status` and by the page's JSON.

Who does what, and who holds it up.
"""

import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.launch.run.supervisor import penstock
from tests.support.run.harness import PATIENCE_S, Training, wait_until_gone

pytest.importorskip("fastapi", reason="the page needs the extra `ui`")

HOPS = (
    "environment_steps",
    "fragments_sent",
    "ack_s",
    "fragments_appended",
    "append_s",
    "trained_steps",
    "updates",
    "staleness",
    "versions",
)
ROLES = ("actor", "evaluator", "broker", "redis", "learner", "launcher")
SHORT = ("--total-steps", "3000", "--set", "evaluation.episodes=5")
LONG = ("--actors", "2", "--total-steps", "100000000", "--set", "learner.stop_at_target=false")


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    training = Training(tmp_path_factory.mktemp("runs") / "watched", "CartPole-v1", "--ui", *LONG)
    try:
        training.until_steps(5_000)
        yield training
    finally:
        training.process.kill()
        training.process.communicate()
        wait_until_gone(training)


def status(training: Training) -> dict[str, Any]:
    reply = subprocess.run(
        penstock("status", str(training.run_dir), "--json"),
        capture_output=True, text=True, timeout=PATIENCE_S, check=True,
    )  # fmt: skip
    return dict(json.loads(reply.stdout))


def asked(training: Training, path: str) -> Any:
    address = json.loads((training.run_dir / "endpoints.json").read_text())["launcher"]["address"]
    with urllib.request.urlopen(address.partition("#")[0] + path, timeout=PATIENCE_S) as reply:  # noqa: S310 - http
        return json.loads(reply.read())


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_status_shows_rates_versions_and_health_of_every_role(training: Training) -> None:
    seen: dict[str, Any] = {}

    def all_flows() -> bool:
        """A second without an update is rare, and no mistake; neither is an evaluator that starts late."""
        seen.update(status(training))
        return all(seen["flow"][hop] for hop in HOPS) and len(seen["roles"]) == len(ROLES)

    training.until(all_flows)
    roles = {row["role"]: row for row in seen["roles"]}
    assert tuple(roles) == ROLES
    assert all(row["healthy"] == row["of"] and not row["problems"] for row in roles.values())
    assert roles["actor"]["of"] == 2
    assert roles["learner"]["version"] == str(seen["flow"]["version"])
    assert seen["bottleneck"]["bound"] != "not measured"
    assert "the learner waits" in seen["bottleneck"]["reason"]
    assert seen["run"].startswith("cartpole-v1-")


def test_status_in_words_begins_with_the_bottleneck(training: Training) -> None:
    reply = subprocess.run(
        penstock("status", str(training.run_dir)),
        capture_output=True, text=True, timeout=PATIENCE_S, check=True,
    )  # fmt: skip
    first, _, rest = reply.stdout.partition("\n")
    assert "-bound: " in first or first.startswith("balanced: ")
    assert "steps/s" in rest
    assert "versions behind" in rest or "version behind" in rest


@pytest.mark.parametrize(("role", "bound"), [("learner", "learner-bound"), ("broker", "broker-bound")])
def test_a_process_that_stands_still_is_named_as_the_bottleneck(
    training: Training, role: str, bound: str
) -> None:
    name = training.run_dir.name
    with stopped(training.pids()[role]):
        verdict = status(training)["bottleneck"]
        assert verdict["bound"] == bound
        assert verdict["stands_still"]
        assert f"{role} stands still: stopped by a signal" in verdict["reason"]
        training.until(lambda: asked(training, f"api/runs/{name}")["now"]["bottleneck"]["bound"] == bound)
    training.until(lambda: not asked(training, f"api/runs/{name}")["now"]["bottleneck"]["stands_still"])


def test_the_page_tells_the_curve_as_it_grows(training: Training) -> None:
    name = training.run_dir.name
    (listed,) = asked(training, "api/runs")["runs"]
    assert (listed["name"], listed["state"], listed["environment"]) == (name, "running", "CartPole-v1")
    before = asked(training, f"api/runs/{name}/curve")["env_steps"][-1]
    training.until(lambda: asked(training, f"api/runs/{name}/curve")["env_steps"][-1] > before)
    curve = asked(training, f"api/runs/{name}/curve")
    assert len({len(column) for column in curve.values()}) == 1
    assert curve["mean_return"][-1] > 0


def test_the_page_ends_with_its_run(tmp_path: Path) -> None:
    training = Training(tmp_path / "short", "CartPole-v1", "--ui", *SHORT, "--json")
    code, out, err = training.end()
    assert code == 0, err
    assert "Logging error" not in err
    assert json.loads(out)["env_steps"] >= 3000
    reply = subprocess.run(
        penstock("status", str(training.run_dir)), capture_output=True, text=True, timeout=60, check=False
    )
    assert reply.returncode == 1
    assert "the run has ended" in reply.stderr
