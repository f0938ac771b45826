import gzip
import json
import math
import os
import random
import re
import select
import signal
import subprocess
import sys
import threading
import tomllib
from itertools import product
from pathlib import Path
from typing import Any, Final

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from penstock.config.configuration_error import ConfigurationError
from penstock.config.settings import Progress, Settings, load
from penstock.learner.feed.recorded_feed import Recording
from penstock.registry.registry import Registry
from penstock.workloads.control.environment import spaces
from penstock.workloads.goals.commands import trace_commands
from penstock.workloads.goals.host import ACTIONS, STATES, SimulatedHost
from penstock.workloads.goals.live_host import (
    SOLVED,
    CommandFile,
    Commands,
    GoalCommand,
    NotAllowed,
    prepare,
    read_commands,
    rehearse,
    target,
)
from penstock.workloads.goals.log_evaluation import look_alikes, read_late
from penstock.workloads.goals.tasks.goal_task import GoalTask
from penstock.workloads.goals.tasks.potential import health
from penstock.workloads.goals.tasks.trace_replay import TraceReplay
from tests.support.experience.bandit_log import PLAIN as BANDIT_LOG_PLAIN
from tests.support.experience.bandit_log import bandit_log, line, written
from tests.support.oracles import off_policy_truth as truth
from tests.support.serving.goals_run import ACTION, OBSERVATION, done, goals_file
from tests.support.storage.postgresql_server import with_registry

TOUCH, PRINTF, SLEEP, CAT, RM, FIND = (
    f"/usr/bin/{name}" for name in ["touch", "printf", "sleep", "cat", "rm", "find"]
)
PYTHON = sys.executable


def executor(folder: Path, command: list[str], *, limit_s: float = 5, output_bytes: int = 4096) -> Commands:
    """One goal `act`, whose program is allowed."""
    goal = GoalCommand(name="act", command=tuple(command))
    told = CommandFile(
        folder=folder, allow=(command[0],), limit_s=limit_s, output_bytes=output_bytes, goal=(goal,)
    )
    return Commands(told, acts=True)


def test_a_command_runs_in_its_own_folder(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.log").write_text("full")
    outcome = executor(tmp_path, [FIND, ".", "-name", "*.log", "-print", "-delete"]).carry_out("act")
    assert outcome.success
    assert list(tmp_path.iterdir()) == []
    assert sorted(outcome.output.split()) == ["./0.log", "./1.log", "./2.log"]
    failed = executor(tmp_path, [CAT, "absent"]).carry_out("act")
    assert (failed.success, failed.error) == (False, "exit 1")
    assert "No such file" in failed.output


def test_an_executor_without_permission_starts_nothing(tmp_path: Path) -> None:
    one = Commands(executor(tmp_path, [TOUCH, "done"])._file, acts=False)
    with pytest.raises(ConfigurationError, match="`penstock inject`.*environment.kwargs.actors_act=true"):
        one.carry_out("act")
    with pytest.raises(ConfigurationError, match="actors_act=true"):
        one.reset(0)
    assert list(tmp_path.iterdir()) == []


def test_no_shell_reads_arguments(tmp_path: Path) -> None:
    words = ["; touch /tmp/x", "$(id)", "`id`", "$HOME", "*", "> out", "&& id"]
    outcome = executor(tmp_path, [PRINTF, "%s|" * len(words), *words]).carry_out("act")
    assert outcome.output == "".join(f"{word}|" for word in words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("then", "limit_s", "error"), [("", 5, ""), ("import time; time.sleep(600)", 1.5, "above 1.5 s")]
)
def test_processes_that_outlive_their_command_are_killed(
    tmp_path: Path, then: str, limit_s: float, error: str
) -> None:
    code = (
        "import subprocess,sys; p=subprocess.Popen([sys.executable,'-c','import time; time.sleep(600)']);"
        f"print(p.pid, flush=True); {then}"
    )
    outcome = executor(tmp_path, [PYTHON, "-c", code], limit_s=limit_s).carry_out("act")
    assert (outcome.success, outcome.error) == (not error, error)
    assert ends(int(outcome.output))


def ends(pid: int) -> bool:
    """Whether a process is gone, or ends soon: one that was killed needs a moment on a busy machine."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], 20)[0])
    finally:
        os.close(handle)


def test_output_is_bounded(tmp_path: Path) -> None:
    code = "import sys; sys.stdout.buffer.write(b'\\xff' + b'x' * 5_000_000)"
    outcome = executor(tmp_path, [PYTHON, "-c", code], output_bytes=10).carry_out("act")
    assert outcome.success
    assert outcome.output == "\ufffd" + "x" * 9


def test_a_command_gets_a_clean_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_TOKEN", "s3cret")
    code = "import os,sys; print(sorted(os.environ), repr(sys.stdin.read()), os.getcwd())"
    outcome = executor(tmp_path, [PYTHON, "-c", code]).carry_out("act")
    assert "s3cret" not in outcome.output
    assert "TOKEN" not in outcome.output
    assert outcome.output.endswith(f"'' {tmp_path.resolve()}\n")
    assert signal.getsignal(signal.SIGINT) is not None


NAMES = st.sampled_from(["sh", "bash", "rm", "cat", "touch", "../bin/cat", "cat ", "CAT", "", "sudo"])
PROGRAMS = st.one_of(
    st.builds(lambda folder, name: folder + name, st.sampled_from(["", "/bin/", "/usr/bin/", "./"]), NAMES),
    st.text(max_size=30),
)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(program=PROGRAMS, arguments=st.lists(st.text(max_size=20), max_size=4))
def test_only_listed_commands_are_started(
    program: str, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    def note(command: list[str], **options: object) -> None:
        started.append(str(options["executable"]))
        assert options["shell"] is False
        assert command[0] == options["executable"]
        raise OSError("not in this test")

    monkeypatch.setattr(subprocess, "Popen", note)
    told = CommandFile.model_construct(
        folder=tmp_path,
        allow=(TOUCH,),
        limit_s=1.0,
        output_bytes=10,
        goal=(GoalCommand.model_construct(name="act", command=(program, *arguments), safe=False),),
    )
    one = Commands(told, acts=True)
    if program == TOUCH:
        one.carry_out("act")
    else:
        with pytest.raises(NotAllowed):
            one.carry_out("act")
        assert started == []
    with pytest.raises(KeyError):
        one.carry_out(program + "!")


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ('allow = ["find"]', "allow='find': must be the absolute path"),
        ('allow = ["/usr/bin/absent"]', "must be the absolute path of a program that can be started"),
        ('allow = ["/bin/sh"]', "allow='/bin/sh': starts any program in its arguments"),
        ('allow = ["/usr/bin/env"]', "starts any program in its arguments"),
        ('allow = ["/usr/bin/cat"]', "goal 'clean': '/usr/bin/find' is not among allow"),
        ('allow = ["/usr/bin/find"]\nlimit_s = 0', "limit_s="),
        ('allow = ["/usr/bin/find"]\nfolder = "/"', "folder='/': must be the absolute path of a folder"),
        ('allow = ["/usr/bin/find"]\nfolder = "here"', "folder='here'"),
        ('allow = ["/usr/bin/find"]\nshell = true', "shell="),
        ("allow = [", "cannot be read"),
    ],
)
def test_a_file_that_would_allow_too_much_is_refused(tmp_path: Path, lines: str, why: str) -> None:
    folder = "" if "folder" in lines else f'folder = "{tmp_path}"\n'
    path = tmp_path / "goals.toml"
    path.write_text(f'{folder}{lines}\n[[goal]]\nname = "clean"\ncommand = ["/usr/bin/find", "."]\n')
    with pytest.raises(ConfigurationError, match=why):
        read_commands(path)


QUIET = Progress(print, threading.Event())


def host_settings(folder: Path, count: int = 0, slots: int = 1, **kwargs: Any) -> Settings:
    commands = {"executor": "commands", "goals": str(goals_file(folder))}
    environment = {"id": "Goals-v0", "count": slots, "kwargs": commands | kwargs}
    return load([{"workload": "goals", "environment": environment, "actor": {"count": count}}])


def test_its_spaces_and_target_are_known_and_nothing_has_run(tmp_path: Path) -> None:
    live = host_settings(tmp_path).environment
    for acts in (False, True):
        section = live.model_copy(update={"kwargs": {**live.kwargs, "actors_act": acts}})
        assert spaces(section) == (OBSERVATION, ACTION)
        with pytest.raises(ConfigurationError, match="unexpected keyword argument 'luck'"):
            spaces(section.model_copy(update={"kwargs": {**section.kwargs, "luck": 1}}))
    assert done(tmp_path) == 0
    assert target(live) is None
    assert target(live.model_copy(update={"kwargs": {}})) == SOLVED
    assert target(live.model_copy(update={"id": "CartPole-v1", "kwargs": {}})) == 475


def test_a_run_on_a_live_host_is_not_evaluated(tmp_path: Path) -> None:
    live = host_settings(tmp_path, count=1, actors_act=True)
    assert prepare(live, tmp_path, QUIET).evaluation.episodes == 0
    with pytest.raises(ConfigurationError, match="--dry-run: .*executor='simulated'"):
        rehearse(live, tmp_path, QUIET)
    simulated = load([{"workload": "goals", "environment": {"id": "Goals-v0"}}])
    assert prepare(simulated, tmp_path, QUIET) == rehearse(simulated, tmp_path, QUIET).settings == simulated


@pytest.mark.parametrize(
    ("count", "slots", "kwargs", "why"),
    [
        (1, 1, {}, "actor.count=1: .*actors_act=true"),
        (1, 1, {"actors_act": "true"}, "actor.count=1: .*actors_act=true"),
        (1, 16, {"actors_act": True}, "environment.count=16: .*set both to 1"),
        (2, 1, {"actors_act": True}, "actor.count=2, .*set both to 1"),
    ],
)
def test_actors_act_only_where_the_run_allows_it(
    tmp_path: Path, count: int, slots: int, kwargs: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigurationError, match=why):
        prepare(host_settings(tmp_path, count, slots, **kwargs), tmp_path, QUIET)


PLAIN: Final = ("--reward", "failure=0", "--reward", "step=0", "--reward", "fast=0")
"""A success earns 1, and nothing else counts."""


def call(*words: object) -> tuple[int, str]:
    reply = CliRunner().invoke(trace_commands, [str(word) for word in words])
    return reply.exit_code, reply.output


def test_check_names_the_fault_of_a_line(tmp_path: Path) -> None:
    lines = [line(number, event) for number, event in enumerate(truth.bandit_log(0, 900))]
    code, output = call("check", written(tmp_path, lines))
    assert code == 0
    assert "900 lines, 900 whole episodes, 900 decisions (independent decisions)" in output
    lines[811] = lines[811].replace('"propensity": 0', '"propensity": 7')
    code, output = call("check", written(tmp_path, lines))
    assert (code, "line 812: propensity='7." in output) == (1, True)
    code, output = call("check", written(tmp_path, lines), "--json")
    assert json.loads(output)["faults"][0]["line"] == 812
    code, output = call("check", written(tmp_path, []))
    assert (code, "the file is empty" in output) == (1, True)


def test_estimates_equal_closed_forms(tmp_path: Path) -> None:
    path = bandit_log(tmp_path, 0, 4000)
    words = ("--policy", "uniform", "--policy", "always:action1", *PLAIN, "--json")
    code, output = call("evaluate", path, *words)
    assert code == 0
    told = json.loads(output)
    uniform, always = told["policies"]
    for one, policy in ((uniform, ((1 / 3,) * 3,) * 3), (always, ((0.0, 1.0, 0.0),) * 3)):
        value = truth.bandit_value(policy)
        for name in ("ips", "self_normalised", "doubly_robust"):
            assert abs(one[name]["value"] - value) < 0.06
            assert one[name]["low"] < one[name]["value"] < one[name]["high"]
    assert abs(told["logged"]["mean_return"] - truth.bandit_value(truth.LOGGING)) < 0.05
    code, output = call("evaluate", bandit_log(tmp_path, 1, 60), "--policy", "always:action0")
    assert (code, "not judged: effective sample size" in output) == (1, True)


def test_decisions_without_their_propensity_are_left_out(tmp_path: Path) -> None:
    events = truth.bandit_log(1, 600)
    lines = [line(number, event) for number, event in enumerate(events)]
    _, alone = call("evaluate", written(tmp_path, lines), "--policy", "uniform", "--json")
    gated = [line(1000 + number, event, propensity=None) for number, event in enumerate(events[:200])]
    _, output = call("evaluate", written(tmp_path, lines + gated), "--policy", "uniform", "--json")
    before, after = json.loads(alone)["policies"][0], json.loads(output)["policies"][0]
    assert (before["left_out"], after["left_out"]) == (0, 200)
    assert after["ips"] == before["ips"]


def test_late_rewards_enter(tmp_path: Path) -> None:
    path = bandit_log(tmp_path, 2, 600)
    late = tmp_path / "late.jsonl"
    rewards = [(f"e{number}", 0, 1.0) for number in range(600)] + [("elsewhere", 0, 5.0)]
    late.write_text("".join(json.dumps({"episode": e, "step": s, "amount": a}) + "\n" for e, s, a in rewards))
    url = f"sqlite:///{tmp_path / 'registry.sqlite'}"
    registry = Registry.open(with_registry(url), migrate=True)
    registry.add_feedback("mine", rewards)
    registry.close()
    asked = ("evaluate", path, "--policy", "uniform", *PLAIN, "--json")
    (_, plain), (_, filed) = call(*asked), call(*asked, "--late", late)
    _, stored = call(*asked, "--late", url, "--late-policy", "mine")
    one, two, three = (json.loads(output)["policies"][0] for output in (plain, filed, stored))
    assert two["self_normalised"]["value"] == pytest.approx(one["self_normalised"]["value"] + 1)
    assert (two["late"], two["late_unmatched"]) == (600, 1)
    assert three["self_normalised"] == two["self_normalised"]


def test_a_late_reward_that_comes_twice_counts_once(tmp_path: Path) -> None:
    rows = [
        {
            "number": n,
            "episode": f"e{n}",
            "step": 0,
            "amount": 0.5 * n,
            "createdAt": "then",
            "request": f"r{n}",
        }
        for n in range(6)
    ]
    keyless = {"episode": "e9", "step": 1, "amount": 1.0}
    by_request = [{**keyless, "request": "once", "number": None}] * 3
    file = tmp_path / "late.jsonl"
    file.write_text(
        "\ufeff" + "\r\n\n".join(map(json.dumps, [*rows, *rows[:3], *by_request, keyless, keyless]))
    )
    wanted = {(f"e{n}", 0): 0.5 * n for n in range(6)} | {("e9", 1): 3.0}
    assert read_late(str(file), "") == wanted
    file.write_bytes(gzip.compress(json.dumps([*rows, *rows, *by_request, keyless, keyless]).encode()))
    assert read_late(str(file), "") == wanted
    broken = [
        {**rows[1], "amount": 9.0},
        {**rows[2], "step": 7},
        {"number": 8},
        {**keyless, "amount": math.nan},
    ]
    file.write_text("\n".join(map(json.dumps, [*rows, *broken])))
    with pytest.raises(ConfigurationError) as refused:
        read_late(str(file), "")
    assert [line.partition(".jsonl: ")[2] for line in str(refused.value).split("\n")] == [
        "line 7: number=1: is that of another reward before it",
        "line 8: number=2: is that of another reward before it",
        "line 9: episode: is missing; step: is missing; amount: is missing",
        "line 10: amount='nan': is no finite number of 64 bits",
    ]


@pytest.mark.parametrize("policy", ["uniform", "always:action0", "always:action1", "always:action2"])
def test_shuffled_propensities_are_refused_for_every_policy(tmp_path: Path, policy: str) -> None:
    events = truth.bandit_log(3, 2000)
    shuffled = [event.logged for event in events]
    random.Random(0).shuffle(shuffled)
    pairs = zip(events, shuffled, strict=True)
    path = written(tmp_path, [line(n, event, propensity=one) for n, (event, one) in enumerate(pairs)])
    code, output = call("evaluate", path, "--policy", policy, *PLAIN)
    assert (code, "as frequent as they allow" in output) == (1, True), output


def test_an_interval_without_width_states_what_it_omits(tmp_path: Path) -> None:
    path = bandit_log(tmp_path, 0, 600, result={"success": True})
    code, output = call("evaluate", path, "--policy", "always:action1", *PLAIN)
    assert (code, "would not show, and the intervals leave it out" in output) == (0, True), output


def test_a_registry_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = bandit_log(tmp_path, 0, 600)
    asked = ("evaluate", path, "--policy", "uniform", *PLAIN, "--late")
    for url in (f"sqlite:///{tmp_path}/absent.sqlite", "postgresql://x@127.0.0.1:1/x"):
        code, output = call(*asked, url)
        assert (code, "--late: registry" in output.replace("\n", " ")) == (2, True), output
    url = f"sqlite:///{tmp_path / 'registry.sqlite'}"
    Registry.open(with_registry(url), migrate=True).close()
    code, output = call(*asked, url, "--late-policy", "nix")
    assert (code, "there are no late rewards of policy 'nix'" in output) == (0, True), output


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--policy always:dance", "action='dance': not one of action0, action1, action2"),
        ("--policy nowhere", "--policy nowhere: .*policy.json: not there"),
        ("--policy uniform --reward luck=1", "reward.luck: unknown; known: crash"),
        ("--policy uniform --reward success", "--reward success: write KEY=NUMBER"),
        ("--policy uniform --reward success=nan", "reward.success=nan"),
        ("--policy uniform --late late.jsonl", "late.jsonl: line 1: amount=.*less than or equal"),
        ("--policy uniform --late absent.jsonl", "--late .*absent.jsonl: cannot be read: No such file"),
    ],
)
def test_bad_usage_is_exit_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, why: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("late.jsonl").write_text('{"episode": "e1", "step": 0, "amount": 1e308}\n')
    code, output = call("evaluate", bandit_log(tmp_path, 0, 60), *words.split())
    assert code == 2, output
    assert re.search(why, output.replace("\n", " ")), output


COUNT = 500


def imported(path: Path, out: Path) -> tuple[dict[str, object], dict[str, np.ndarray]]:
    """What the command says, and what the recording holds, row by row."""
    reply = CliRunner().invoke(trace_commands, ["import", str(path), "--out", str(out), "--json"])
    assert reply.exit_code == 0, reply.output
    recording = Recording(out)
    loaded = recording.load(recording.fragments)
    names = ("observation", "action", "reward", "terminated", "log_prob")
    rows = {
        name: np.concatenate([arrays[name][: header.steps, 0] for header, arrays in loaded]) for name in names
    }
    return json.loads(reply.output), rows


def test_a_recording_holds_every_decision(tmp_path: Path) -> None:
    account, rows = imported(bandit_log(tmp_path, 0, COUNT), tmp_path / "out")
    events = truth.bandit_log(0, COUNT)
    assert (account["episodes"], account["propensities"]) == (COUNT, "logged")
    assert rows["observation"][:, :3].argmax(1).tolist() == [event.context for event in events]
    assert rows["action"].tolist() == [event.action for event in events]
    assert rows["reward"] == pytest.approx([0.99 if event.reward else -0.51 for event in events])
    assert rows["terminated"].all()
    assert np.exp(rows["log_prob"]) == pytest.approx([event.logged for event in events], rel=1e-5)
    told = tomllib.loads((tmp_path / "out" / "run.toml").read_text())
    assert told["environment"]["kwargs"]["actions"] == ["action0", "action1", "action2"]


def test_propensities_that_are_absent_are_estimated_and_marked(tmp_path: Path) -> None:
    account, rows = imported(bandit_log(tmp_path, 0, 4000, propensity=None), tmp_path / "out")
    assert account["propensities"] == "estimated"
    assert "propensities: estimated" in (tmp_path / "out" / "run.toml").read_text()
    true = np.array([event.logged for event in truth.bandit_log(0, 4000)])
    assert np.abs(np.exp(rows["log_prob"]) - true).max() < 0.06


def test_a_decision_without_its_propensity_leaves_only_itself_out(tmp_path: Path) -> None:
    events = truth.bandit_log(0, COUNT)
    lines = [line(number, event) for number, event in enumerate(events)]
    lines[7] = line(7, events[7], propensity=None)
    account, _ = imported(written(tmp_path, lines), tmp_path / "out")
    assert account["propensities"] == f"logged of {COUNT - 1} decisions, estimated of the others"
    told = tomllib.loads((tmp_path / "out" / "by_propensity.toml").read_text())
    kwargs = told["environment"]["kwargs"]
    alone = TraceReplay(**kwargs)
    starts = {alone.reset(seed=0 if not number else None)[0].tobytes() for number in range(COUNT - 1)}
    assert len(alone._episodes) == COUNT - 1
    assert len(starts) == len(truth.CONTEXTS)
    assert all(episode[0].episode != "e7" for episode in alone._episodes)


@pytest.mark.parametrize("explored", [0.0, 0.1])
@pytest.mark.parametrize("chosen", ["above", "inside", "of three"])
def test_propensities_that_the_log_contradicts_are_refused(
    tmp_path: Path, chosen: str, explored: float
) -> None:
    rng = np.random.default_rng(0)
    first = rng.normal(size=1500)
    bests = {"above": first > 0, "inside": np.abs(first) < 0.7, "of three": np.digitize(first, [-0.4, 0.4])}
    best, count = bests[chosen], 3 if chosen == "of three" else 2
    action = np.where(rng.random(1500) < explored, rng.integers(0, count, 1500), best)
    rows = [
        {
            "time": 1.0,
            "episode": f"e{n}",
            "step": 0,
            "observation": {"x": first[n], "y": rng.normal()},
            "action": f"do {action[n]}",
            "propensity": 1 / count,
            "result": {"success": bool(action[n] == best[n])},
        }
        for n in range(1500)
    ]
    path = written(tmp_path, list(map(json.dumps, rows)))
    code, output = call("evaluate", path, "--policy", "uniform", *PLAIN)
    assert (code, "the propensities do not belong to the actions" in output) == (1, True), output
    assert "an imitation of other episodes gives each action" in output


def test_propensities_that_are_true_are_never_refused(tmp_path: Path) -> None:
    for seed in range(20):
        code, output = call("evaluate", bandit_log(tmp_path, seed, 600), "--policy", "uniform", *PLAIN)
        assert code == 0, output


def test_actions_that_look_alike_are_named(tmp_path: Path) -> None:
    done = {"rotate_logs": 900, "restart": 400, "action1": 300, "action2": 5, "wait": 200, "rotate_lgos": 7}
    done |= {"Rotate-Logs": 90, "restart\u200b": 1, "w\uff41it": 2, "restrat": 3, "scale up": 4}
    assert look_alikes(done) == {
        "rotate_lgos": "rotate_logs",
        "Rotate-Logs": "rotate_logs",
        "restart\u200b": "restart",
        "w\uff41it": "wait",
        "restrat": "restart",
    }
    lines = [line(number, event) for number, event in enumerate(truth.bandit_log(0, 300))]
    lines[5] = lines[5].replace('"action": "action', '"action": "Action ')
    code, output = call("check", written(tmp_path, lines))
    assert (code, "looks like 'action" in output) == (0, True), output


def test_a_folder_that_is_taken_is_refused(tmp_path: Path) -> None:
    code, output = call("import", bandit_log(tmp_path, 0, 60), "--out", tmp_path)
    assert (code, "holds something already" in output) == (2, True)


def test_a_large_log_is_recorded_whole_and_measured_by_a_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.workloads.goals.trace_index.MOST_LINES", COUNT // 2)
    monkeypatch.setattr("penstock.workloads.goals.trace_index.MOST_HELD", 100)
    monkeypatch.setattr("penstock.workloads.goals.trace_import.MOST_HELD", 100)
    account, rows = imported(bandit_log(tmp_path, 0, COUNT), tmp_path / "out")
    assert (account["episodes"], account["measured_by"], len(rows["action"])) == (COUNT, 100, COUNT)
    told = tomllib.loads((tmp_path / "out" / "run.toml").read_text())
    sample = Path(told["environment"]["kwargs"]["trace_file"])
    assert (sample.parent, len(sample.read_text().splitlines())) == (tmp_path / "out", 100)
    assert "from 100 episodes" in (tmp_path / "out" / "by_propensity.toml").read_text()


def test_it_is_a_gymnasium_environment_whose_seed_says_all() -> None:
    check_env(GoalTask(), skip_render_check=True)
    environment = gymnasium.make("penstock.workloads.goals.tasks:Goals-v0")
    assert environment.action_space.n == 11  # type: ignore[attr-defined]
    assert environment.observation_space.shape == (20,)
    actions, seen = np.random.default_rng(0).integers(11, size=50), []
    for seed in (1, 1, 2):
        healthy, _ = environment.reset(seed=seed)
        steps = [environment.step(action) for action in actions]
        assert [step[3] for step in steps] == [False] * 49 + [True]
        seen.append([healthy.tolist(), *[(step[0].tolist(), step[1]) for step in steps]])
    assert seen[0] == seen[1] != seen[2]
    ill = healthy.copy()
    ill[:3] += 0.5
    assert health({"observation": np.stack([healthy, ill])}) == pytest.approx([-0.4, -1.9], abs=1e-6)
    environment.reset(seed=0)
    assert environment.step(np.int64(0))[1] == pytest.approx(-0.01), "doing nothing costs a step"
    assert environment.step(np.int64(ACTIONS.index("check_disks")))[1] == pytest.approx(-0.51)


def test_readings_distinguish_every_state_of_a_host() -> None:
    host = SimulatedHost()
    signs = set()
    for index in range(len(STATES)):
        host._state = index
        seen = host.read()
        signs.add((seen.cpu, seen.memory, seen.disk, seen.processes))
    assert len(signs) == len(STATES)


def test_actors_start_no_command_unless_allowed(tmp_path: Path) -> None:
    goals = str(goals_file(tmp_path))
    task = GoalTask(executor="commands", goals=goals)
    assert (task.observation_space.shape, task.action_space.n) == ((12,), 3)  # type: ignore[attr-defined]
    for refused in (task.reset, lambda: task.step(np.int64(1)), lambda: task.step(np.int64(2))):
        with pytest.raises(ConfigurationError, match="environment.kwargs.actors_act=true"):
            refused()
    assert done(tmp_path) == 0
    task = GoalTask(executor="commands", goals=goals, actors_act=True)
    task.reset(seed=0)
    _, reward, *_, info = task.step(np.int64(1))
    assert (info["goal"], done(tmp_path)) == ("leave_a_file", 1)
    assert reward == pytest.approx(1.19 if info["outcome"].took_s < 0.5 else 0.99)


@pytest.mark.parametrize(
    ("kwargs", "why"),
    [
        ({"executor": "shell"}, "executor='shell': must be one of simulated, commands"),
        ({"executor": "commands"}, "environment.kwargs.goals: is missing"),
        ({"goals": "goals.toml"}, "environment.kwargs.goals='goals.toml': is for .*executor='commands'"),
        (
            {"executor": "commands", "goals": "g", "actors_act": "true"},
            "actors_act='true': must be true or false",
        ),
        ({"rewards": {"luck": 1.0}}, "rewards=.*luck"),
    ],
)
def test_arguments_are_checked(kwargs: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        GoalTask(**kwargs)


TARGET = np.array(truth.TARGET)


def returns_of(task: TraceReplay, episodes: int) -> np.ndarray:
    draw = np.random.default_rng(1)
    rewards = []
    seen, _ = task.reset(seed=0)
    for _ in range(episodes):
        action = draw.choice(3, p=TARGET[int(seen[:3].argmax())])
        _, reward, terminated, truncated, _ = task.step(np.int64(action))
        assert terminated
        assert not truncated
        rewards.append(reward)
        seen, _ = task.reset()
    return np.array(rewards)


def test_the_replay_is_a_gymnasium_environment(tmp_path: Path) -> None:
    path = bandit_log(tmp_path, 0, 100)
    check_env(TraceReplay(trace_file=str(path)), skip_render_check=True)
    made = gymnasium.make("penstock.workloads.goals.tasks:Traces-v0", trace_file=str(path), mode="model")
    assert made.reset(seed=0)[1] == {"mode": "model"}


def test_matched_decisions_earn_the_true_return(tmp_path: Path) -> None:
    path = bandit_log(tmp_path, 0, 6000)
    found = returns_of(TraceReplay(trace_file=str(path), reward=BANDIT_LOG_PLAIN), 6000)
    error = found.std() / np.sqrt(len(found))
    value = truth.bandit_value(truth.TARGET)
    assert abs(found.mean() - value) < 4 * error
    assert error < 0.03
    assert abs(found.mean() - truth.bandit_value(truth.LOGGING)) > 4 * error


def test_a_full_log_answers_every_action(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    lines = []
    for number, event in enumerate(truth.bandit_log(0, 1500)):
        well = draw.random(3) < np.array(truth.SUCCESS[event.context])
        outcomes = {f"action{index}": {"success": bool(one)} for index, one in enumerate(well)}
        lines.append(line(number, event, metadata={"outcomes": outcomes}))
    task = TraceReplay(trace_file=str(written(tmp_path, lines)), mode="full", reward=BANDIT_LOG_PLAIN)
    found = returns_of(task, 1500)
    assert abs(found.mean() - truth.bandit_value(truth.TARGET)) < 4 * found.std() / np.sqrt(len(found))


def test_a_reward_model_answers_by_its_fit(tmp_path: Path) -> None:
    task = TraceReplay(trace_file=str(bandit_log(tmp_path, 0, 5000)), mode="model", reward=BANDIT_LOG_PLAIN)
    for episode in range(30):
        seen, _ = task.reset(seed=episode)
        context, action = int(seen[:3].argmax()), episode % 3
        _, reward, _, _, info = task.step(np.int64(action))
        assert abs(reward - truth.SUCCESS[context][action]) < 0.08
        assert info == {"mode": "model", "known": True}


def episodes_log(folder: Path) -> Path:
    """Two episodes of three decisions: `go` each time, but `stop` at the end of the second."""
    about = {"time": 0.0, "result": {"success": True, "execution_time_ms": 7.0}}
    lines = []
    for name, step in product("ab", range(3)):
        action = "stop" if (name, step) == ("b", 2) else "go"
        seen = {"observation": {"step": float(step)}, "action": action}
        lines.append(json.dumps(about | {"episode": name, "step": step} | seen))
    return written(folder, lines)


def test_another_action_ends_an_episode_of_several_decisions(tmp_path: Path) -> None:
    task = TraceReplay(trace_file=str(episodes_log(tmp_path)))
    seen, _ = task.reset(seed=0)
    assert seen[0] == 0
    assert seen[-4:].tolist() == [0, 0, 0, 0]
    seen, reward, terminated, truncated, info = task.step(np.int64(0))
    assert reward == pytest.approx(1.19)
    assert (terminated, truncated, info["known"]) == (False, False, True)
    assert seen[-4:] == pytest.approx([1, 1, 0, np.log(8)]), "the last result is seen, the next one is not"
    _, reward, terminated, truncated, info = task.step(np.int64(1))
    assert (reward, terminated, truncated, info["known"]) == (0, False, True, False)
    for _ in range(2):
        task.reset()
        ends = [task.step(np.int64(task._encoding.action(one.action)))[2:4] for one in task._episode]
        assert ends == [(False, False), (False, False), (True, False)]
    short = TraceReplay(trace_file=str(episodes_log(tmp_path)), max_episode_length=2)
    short.reset(seed=0)
    assert [short.step(np.int64(0))[2:4] for _ in range(2)] == [(False, False), (False, True)]


@pytest.mark.parametrize(
    ("changes", "kwargs", "why"),
    [
        ({}, {"trace_file": ""}, "trace_file: is missing"),
        ({}, {"mode": "guess"}, "mode='guess': must be one of matched, full, model"),
        ({"propensity": None}, {}, "mode='matched': no decision has a propensity"),
        ({}, {"mode": "full"}, "metadata.outcomes must have the result of each of action0"),
        ({"metadata": {"outcomes": [1]}}, {"mode": "full"}, "metadata.outcomes must have"),
        ({}, {"actions": ["action0"]}, "kwargs.actions: action1, action2: the log and the names differ"),
        ({}, {"numbers": ["heat"]}, "kwargs.numbers: heat"),
        ({}, {"reward": {"luck": 1}}, "reward.luck: unknown"),
    ],
)
def test_settings_that_do_not_fit_are_named(
    tmp_path: Path, changes: dict[str, Any], kwargs: dict[str, Any], why: str
) -> None:
    path = bandit_log(tmp_path, 0, 60, **changes)
    with pytest.raises(ConfigurationError, match=why):
        TraceReplay(**({"trace_file": str(path)} | kwargs))
