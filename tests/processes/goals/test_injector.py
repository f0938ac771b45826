"""`penstock inject` as a process against a real policy server: killed, vetoed, silent, refused."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from penstock.runtime.failpoint import FAILPOINTS_VARIABLE
from penstock.workloads.goals.injection_journal import FEEDBACK, INJECTIONS, veto
from tests.support.run import harness
from tests.support.run.harness import eventually
from tests.support.serving.goals_run import done, goals_file, goals_run, injector_words, lines

KILLED: Final = -9
ALWAYS: Final = ("--auto", "--threshold", "0.01", "--seed", "1")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("served")
    goals_run(folder / "run")
    with harness.server(folder / "server", folder / "run") as found:
        yield found.address


def inject(
    server: str, folder: Path, *words: str, fail: str = "", zone: str = "UTC0"
) -> "subprocess.CompletedProcess[str]":
    """Run an injector to its end. zone: what its local time is, as TZ says it."""
    environment = {**os.environ, FAILPOINTS_VARIABLE: fail, "TZ": zone}
    return subprocess.run(
        injector_words(server, folder, *words), capture_output=True, text=True, check=False, env=environment,
        timeout=120,
    )  # fmt: skip


@contextmanager
def injecting(server: str, folder: Path, *words: str) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        injector_words(server, folder, *words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("point", "ran_unseen"),
    [("asked", 0), ("told", 0), ("injected", 0), ("done", 1), ("feedback", 0), ("rewarded", 0)],
)
def test_a_killed_injector_continues_without_doing_a_goal_twice(
    server: str, tmp_path: Path, point: str, ran_unseen: int
) -> None:
    goals_file(tmp_path)
    killed = inject(server, tmp_path, *ALWAYS, "--steps", "6", fail=f"inject.{point}=kill@3")
    assert killed.returncode == KILLED, killed.stderr
    before = done(tmp_path)
    again = inject(server, tmp_path, *ALWAYS, "--steps", "3")
    assert again.returncode == 0, again.stderr
    newest = {line["goal_id"]: line for line in lines(tmp_path, INJECTIONS)}
    feedback = lines(tmp_path, FEEDBACK)
    injected = {name for name, line in newest.items() if line["injected"]}
    assert Counter(line["goal_id"] for line in feedback) == Counter(injected)
    assert all(newest[name]["processed"] for name in injected)
    known = [line for line in feedback if line["success"] is not None]
    unknown = len(feedback) - len(known)
    assert unknown == (1 if point in ("injected", "done") else 0)
    assert done(tmp_path) == len(known) + ran_unseen
    assert done(tmp_path) > before
    assert all(line["success"] and line["reward"] == pytest.approx(1.19) for line in known)


def test_a_vetoed_goal_is_not_done_and_the_next_is(server: str, tmp_path: Path) -> None:
    goals_file(tmp_path)
    with injecting(server, tmp_path, *ALWAYS, "--veto-s", "4") as injector:
        eventually(lambda: lines(tmp_path, INJECTIONS), "a proposal", within_s=60)
        first = lines(tmp_path, INJECTIONS)[0]["goal_id"]
        veto(tmp_path / "injector", first)
        eventually(lambda: lines(tmp_path, FEEDBACK), "an outcome", within_s=60)
        injector.terminate()
        injector.wait(30)
    newest = {line["goal_id"]: line for line in lines(tmp_path, INJECTIONS)}
    assert not newest[first]["injected"]
    assert newest[first]["metadata"]["held"] == "veto"
    feedback = lines(tmp_path, FEEDBACK)
    assert first not in {line["goal_id"] for line in feedback}
    assert done(tmp_path) == len(feedback)
    late = inject(server, tmp_path, "--veto", feedback[0]["goal_id"])
    assert (late.returncode, "was carried out already" in late.stderr) == (1, True)
    unknown = inject(server, tmp_path, "--veto", "0" * 32)
    assert (unknown.returncode, "no such goal" in unknown.stderr) == (2, True)


def test_an_injector_loads_no_torch(server: str, tmp_path: Path) -> None:
    goals_file(tmp_path)
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "torch.py").write_text("raise ImportError('not here')\n")
    hidden = {**os.environ, "PYTHONPATH": str(tmp_path / "hidden")}
    control = [sys.executable, "-c", "import torch"]
    assert subprocess.run(control, env=hidden, capture_output=True, check=False).returncode == 1
    command = injector_words(server, tmp_path, *ALWAYS, "--steps", "3")
    told = subprocess.run(command, env=hidden, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    assert done(tmp_path) > 0


HOUR: Final = time.gmtime().tm_hour
QUIET: Final = (*ALWAYS, "--quiet", f"{(HOUR - 1) % 24:02}:00-{(HOUR + 2) % 24:02}:00")
CAREFUL: Final = ("--auto", "--threshold", "0.95", "--seed", "1", "--explore")


@pytest.mark.parametrize(
    ("held", "why", "freed", "zone"),
    [
        ((), "auto is off; start with --auto", ALWAYS, "UTC0"),
        ((*CAREFUL, "0"), "threshold; lower --threshold", (*CAREFUL, "1"), "UTC0"),
        (QUIET, "quiet hours; wait, or change --quiet", QUIET, "EAST-12"),
    ],
    ids=["it only proposes", "below the threshold safe goals alone are tried", "it is quiet here"],
)
def test_what_holds_goals_back_is_told_with_a_remedy(
    server: str, tmp_path: Path, held: tuple[str, ...], why: str, freed: tuple[str, ...], zone: str
) -> None:
    goals_file(tmp_path)
    assert inject(server, tmp_path, *held, "--steps", "6").returncode == 0
    assert done(tmp_path) == 0
    assert f"held back: {why}" in inject(server, tmp_path, "--explain").stdout
    account = json.loads(inject(server, tmp_path, "--explain", "--json").stdout)
    assert account["proposed"] == sum(account["held"].values()) > 0
    assert inject(server, tmp_path, *freed, "--steps", "6", zone=zone).returncode == 0
    assert done(tmp_path) > 0


def test_a_daily_limit_outlives_a_restart(server: str, tmp_path: Path) -> None:
    goals_file(tmp_path)
    for _ in range(2):
        told = inject(server, tmp_path, *ALWAYS, "--daily-limit", "2", "--steps", "5")
        assert told.returncode == 0, told.stderr
        assert done(tmp_path) == 2


def test_a_clock_that_was_set_back_costs_one_interval(server: str, tmp_path: Path) -> None:
    goals_file(tmp_path)
    assert inject(server, tmp_path, *ALWAYS, "--steps", "3").returncode == 0
    file = tmp_path / "injector" / INJECTIONS
    later = [
        {**json.loads(line), "timestamp": time.time() + 86_400} for line in file.read_text().splitlines()
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in later))
    before = done(tmp_path)
    assert inject(server, tmp_path, *ALWAYS, "--steps", "6", "--interval", "0.1").returncode == 0
    assert done(tmp_path) > before


def test_an_injector_switched_off_stays_off_after_a_restart(server: str, tmp_path: Path) -> None:
    goals_file(tmp_path)
    assert inject(server, tmp_path, "--steps", "1").returncode == 0
    assert inject(server, tmp_path, "--switch", "off").returncode == 0
    told = inject(server, tmp_path, *ALWAYS, "--steps", "3")
    assert (told.returncode, done(tmp_path)) == (0, 0)
    assert "auto is off in" in told.stderr
    assert inject(server, tmp_path, "--switch", "on").returncode == 0
    assert inject(server, tmp_path, *ALWAYS[1:], "--steps", "3").returncode == 0
    assert done(tmp_path) > 0


def test_goals_that_fail_more_often_than_before_stop_it(server: str, tmp_path: Path) -> None:
    goals_file(tmp_path)
    assert inject(server, tmp_path, *ALWAYS, "--steps", "70").returncode == 0
    text = (tmp_path / "goals.toml").read_text()
    (tmp_path / "goals.toml").write_text(text.replace('"done.XXXXXXXX"', '"absent/done.XXXXXXXX"'))
    stopped = inject(server, tmp_path, *ALWAYS, "--steps", "70")
    assert stopped.returncode == 1, stopped.stderr
    assert "injecting has stopped: of the last 30 injected goals" in stopped.stderr
    again = inject(server, tmp_path, *ALWAYS, "--steps", "1")
    assert again.returncode == 1
    assert "then start with --resume" in again.stderr
    assert "it has stopped itself" in inject(server, tmp_path, "--explain").stdout
    assert inject(server, tmp_path, *ALWAYS, "--steps", "1", "--resume").returncode == 0
    assert inject(server, tmp_path, *ALWAYS, "--steps", "1").returncode == 0


def test_a_policy_of_values_is_refused_unless_it_draws_from_a_softmax(tmp_path: Path) -> None:
    goals_file(tmp_path)
    goals_run(tmp_path / "run", discrete="epsilon_greedy", shared_trunk=True)
    with harness.server(tmp_path / "greedy", tmp_path / "run") as found:
        told = inject(found.address, tmp_path, *ALWAYS, "--steps", "3")
    assert told.returncode == 2, told.stderr
    assert "chooses by the values of actions (DQN)" in told.stderr
    assert "--set serving.softmax_temperature=" in told.stderr
    assert done(tmp_path) == 0
    with harness.server(tmp_path / "server", tmp_path / "run", softmax_temperature=1.0) as found:
        told = inject(found.address, tmp_path, *ALWAYS, "--steps", "6")
    assert told.returncode == 0, told.stderr
    assert done(tmp_path) > 0
    expected = {"leave_a_file": 0.898, "leave_another": 0.0995}
    for line in lines(tmp_path, INJECTIONS):
        assert line["confidence"] == pytest.approx(expected[line["goal"]], abs=0.002)


def test_two_injectors_do_not_share_a_folder(server: str, tmp_path: Path) -> None:
    goals_file(tmp_path)
    with injecting(server, tmp_path, "--interval", "60"):
        eventually((tmp_path / "injector" / INJECTIONS).exists, "the first injector", within_s=60)
        second = inject(server, tmp_path, "--steps", "1")
    assert second.returncode == 2
    assert "another injector works in it" in second.stderr


def test_a_policy_that_does_not_fit_is_refused_and_an_absent_server_is_waited_for(
    server: str, tmp_path: Path
) -> None:
    goals_file(tmp_path)
    refused = inject(server, tmp_path, "--policy", "nix", "--steps", "2")
    assert (refused.returncode, "policy='nix'" in refused.stderr) == (2, True), refused.stderr
    refused = inject(server, tmp_path, "--client-key", "k" * 5000, "--steps", "2")
    assert (refused.returncode, len(refused.stderr) < 1000) == (2, True), refused.stderr
    file = tmp_path / "goals.toml"
    file.write_text(f'{file.read_text()}[[goal]]\nname = "a_third"\ncommand = ["/usr/bin/mktemp"]\n')
    refused = inject(server, tmp_path, "--steps", "1")
    assert refused.returncode == 2
    assert "need 13 numbers and 4 actions (nothing, leave_a_file, leave_another, a_third)" in refused.stderr
    away = inject(f"unix:{tmp_path}/no.sock", tmp_path, "--steps", "1", "--json")
    assert away.returncode == 0, away.stderr
    assert json.loads(away.stdout) == {"intervals": 1, "unanswered": 1}
