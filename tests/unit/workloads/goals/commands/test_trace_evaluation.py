"""`penstock traces`, as its user calls it, on logs whose truth is known."""

import json
import random
import re
from pathlib import Path
from typing import Final

import pytest
from typer.testing import CliRunner

from penstock.registry.registry import Registry
from penstock.workloads.goals.commands import trace_commands
from tests.support.experience.bandit_log import line, written
from tests.support.oracles import off_policy_truth as truth
from tests.support.storage.ready_tables import with_registry

PLAIN: Final = ("--reward", "failure=0", "--reward", "step=0", "--reward", "fast=0")
"""A success earns 1, and nothing else counts."""


def call(*words: object) -> tuple[int, str]:
    """Exit code and output."""
    reply = CliRunner().invoke(trace_commands, [str(word) for word in words])
    return reply.exit_code, reply.output


def test_check_names_what_is_wrong_with_a_line(tmp_path: Path) -> None:
    lines = [line(number, event) for number, event in enumerate(truth.bandit_log(0, 900))]
    code, output = call("check", written(tmp_path, lines))
    assert code == 0
    assert "900 lines, 900 whole episodes, 900 decisions (independent decisions)" in output
    lines[811] = lines[811].replace('"propensity": 0', '"propensity": 7')
    code, output = call("check", written(tmp_path, lines))
    assert code == 1
    assert "line 812: propensity='7." in output
    code, output = call("check", written(tmp_path, lines), "--json")
    assert json.loads(output)["faults"][0]["line"] == 812
    code, output = call("check", written(tmp_path, []))
    assert (code, "the file is empty" in output) == (1, True)


def test_policies_are_judged_beside_closed_forms(tmp_path: Path) -> None:
    lines = [line(number, event) for number, event in enumerate(truth.bandit_log(0, 4000))]
    path = written(tmp_path, lines)
    code, output = call(
        "evaluate", path, "--policy", "uniform", "--policy", "always:action1", *PLAIN, "--json"
    )
    assert code == 0
    told = json.loads(output)
    uniform, always = told["policies"]
    for one, policy in ((uniform, ((1 / 3,) * 3,) * 3), (always, ((0.0, 1.0, 0.0),) * 3)):
        value = truth.bandit_value(policy)
        for name in ("ips", "self_normalised", "doubly_robust"):
            assert abs(one[name]["value"] - value) < 0.06
            assert one[name]["low"] < one[name]["value"] < one[name]["high"]
    assert abs(told["logged"]["mean_return"] - truth.bandit_value(truth.LOGGING)) < 0.05


def test_decisions_without_their_propensity_are_left_out(tmp_path: Path) -> None:
    events = truth.bandit_log(1, 600)
    lines = [line(number, event) for number, event in enumerate(events)]
    _, alone = call("evaluate", written(tmp_path, lines), "--policy", "uniform", "--json")
    gated = [line(1000 + number, event, propensity=None) for number, event in enumerate(events[:200])]
    _, output = call("evaluate", written(tmp_path, lines + gated), "--policy", "uniform", "--json")
    before, after = json.loads(alone)["policies"][0], json.loads(output)["policies"][0]
    assert (before["left_out"], after["left_out"]) == (0, 200)
    assert after["ips"] == before["ips"]


def test_a_log_that_cannot_say_is_refused(tmp_path: Path) -> None:
    lines = [line(number, event) for number, event in enumerate(truth.bandit_log(1, 60))]
    code, output = call("evaluate", written(tmp_path, lines), "--policy", "always:action0")
    assert code == 1
    assert "not judged: effective sample size" in output


def test_late_rewards_enter(tmp_path: Path) -> None:
    lines = [line(number, event) for number, event in enumerate(truth.bandit_log(2, 600))]
    path = written(tmp_path, lines)
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


@pytest.mark.parametrize("policy", ["uniform", "always:action0", "always:action1", "always:action2"])
def test_propensities_of_other_lines_are_refused_whatever_policy_is_judged(
    tmp_path: Path, policy: str
) -> None:
    events = truth.bandit_log(3, 2000)
    shuffled = [event.logged for event in events]
    random.Random(0).shuffle(shuffled)
    pairs = zip(events, shuffled, strict=True)
    path = written(tmp_path, [line(n, event, propensity=one) for n, (event, one) in enumerate(pairs)])
    code, output = call("evaluate", path, "--policy", policy, *PLAIN)
    assert (code, "the propensities do not belong to the actions" in output) == (1, True), output


def test_an_interval_without_width_says_what_it_leaves_out(tmp_path: Path) -> None:
    events = truth.bandit_log(0, 600)
    path = written(tmp_path, [line(n, one, result={"success": True}) for n, one in enumerate(events)])
    code, output = call("evaluate", path, "--policy", "always:action1", *PLAIN)
    assert (code, "would not show, and the intervals leave it out" in output) == (0, True), output


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ('{"episode": "e1", "step": 0, "amount": 1e308}', "late.jsonl: line 1: amount: .*less than or equal"),
        (None, "--late .*late.jsonl: cannot be read: No such file"),
    ],
)
def test_late_rewards_that_cannot_be_are_named(tmp_path: Path, content: str | None, why: str) -> None:
    path = written(tmp_path, [line(n, event) for n, event in enumerate(truth.bandit_log(0, 60))])
    if content is not None:
        (tmp_path / "late.jsonl").write_text(content + "\n")
    code, output = call("evaluate", path, "--policy", "uniform", "--late", tmp_path / "late.jsonl")
    assert code == 2, output
    assert re.search(why, output.replace("\n", " ")), output


def test_a_registry_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, [line(n, event) for n, event in enumerate(truth.bandit_log(0, 600))])
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
        (("--policy", "always:dance"), "action='dance': not one of action0, action1, action2"),
        (("--policy", "nowhere"), "--policy nowhere: .*policy.json: not there"),
        (("--policy", "uniform", "--reward", "luck=1"), "reward.luck: unknown; known: crash"),
        (("--policy", "uniform", "--reward", "success"), "--reward success: write KEY=NUMBER"),
        (("--policy", "uniform", "--reward", "success=nan"), "reward.success=nan"),
    ],
)
def test_bad_usage_is_exit_2(tmp_path: Path, words: tuple[str, ...], why: str) -> None:
    path = written(tmp_path, [line(n, event) for n, event in enumerate(truth.bandit_log(0, 50))])
    code, output = call("evaluate", path, *words)
    assert code == 2
    assert re.search(why, output.replace("\n", " "))
