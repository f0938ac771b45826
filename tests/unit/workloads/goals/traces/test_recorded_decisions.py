"""A policy judged on a recording: as plain Python judges it, also where episodes lie in several fragments."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from penstock.config.settings import PolicySection
from penstock.learner.feed.recorded_feed import Recording
from penstock.learner.publish.kept_versions import FinalPolicy, write_final, write_specification
from penstock.policy.policy import Policy, build
from penstock.policy.weights import encode
from penstock.workloads.goals.commands import trace_commands
from penstock.workloads.goals.log_evaluation import collected, learned
from tests.support.experience.bandit_log import line, written
from tests.support.oracles import off_policy_truth as truth

REWARDS = ("--reward", "failure=0", "--reward", "step=0", "--reward", "fast=0")


def recorded(folder: Path, count: int) -> tuple[Path, list[list[truth.Event]]]:
    """A recording of episodes of the chain, most of which go across fragments."""
    episodes = truth.chain_log(0, count)
    lines = [
        line(number, event, episode=f"e{number:05}", step=step)
        for number, episode in enumerate(episodes)
        for step, event in enumerate(episode)
    ]
    out = folder / "recording"
    path = written(folder, lines)
    reply = CliRunner().invoke(trace_commands, ["import", str(path), "--out", str(out), *REWARDS])
    assert reply.exit_code == 0, reply.output
    return out, episodes


def a_run(folder: Path, recording: Path) -> tuple[Path, Policy]:
    """A run that ended with an untrained policy, of the recording's spaces."""
    section = PolicySection()
    told = Recording(recording).specification
    policy = build(told.observation_space, told.action_space, section, 7)
    specification = replace(told, policy_json=section.canonical_json())
    run = folder / "run"
    (run / "policies").mkdir(parents=True)
    write_specification(run, specification)
    blob = encode(policy)
    write_final(run, FinalPolicy(specification=specification, blob=blob, version=1, update=0))
    return run, policy


def test_episodes_are_weighted_as_plain_python_weights_them(tmp_path: Path) -> None:
    recording, episodes = recorded(tmp_path, 300)
    run, policy = a_run(tmp_path, recording)
    words = ["evaluate", str(recording), "--policy", str(run), "--discount", "0.9", "--json"]
    reply = CliRunner().invoke(trace_commands, [*words, "--trust"])
    assert reply.exit_code == 0, reply.output
    told = json.loads(reply.output)["policies"][0]
    assert (told["episodes"], told["left_out"]) == (300, 0)

    loaded = Recording(recording).load(Recording(recording).fragments)
    seen = np.concatenate([arrays["observation"][: header.steps, 0] for header, arrays in loaded])
    chances = iter(learned(policy, deterministic=False)(seen))
    judged = [
        [replace(event, target=float(next(chances)[event.action])) for event in episode]
        for episode in episodes
    ]
    value, error = truth.importance_sampling(judged, 0.9)
    assert told["ips"]["value"] == pytest.approx(value, rel=1e-4)
    assert (told["ips"]["high"] - told["ips"]["low"]) / 2 == pytest.approx(1.96 * error, rel=1e-3)
    assert told["self_normalised"]["value"] == pytest.approx(truth.self_normalised(judged, 0.9), rel=1e-4)


def test_episodes_that_are_not_whole_or_not_known_are_left_out() -> None:
    def column(first: int, valid: list[bool], ends: bool) -> tuple[Any, Any]:
        steps = len(valid)
        slot = SimpleNamespace(slot_id=0, episode_id=next(number), first_step=first)
        end = np.zeros((steps, 1), np.bool_)
        end[-1] = ends
        arrays = {"valid": np.array(valid)[:, None], "terminated": end, "truncated": np.zeros_like(end)}
        arrays |= {name: np.zeros((steps, 1), np.float32) for name in ("observation", "action", "reward")}
        return SimpleNamespace(session=1, steps=steps, slots=(slot,)), arrays | {"log_prob": arrays["reward"]}

    number = iter(range(4))
    loaded = [
        column(0, [True, True], ends=True),
        column(0, [True, False], ends=True),
        column(0, [True, True], ends=False),
        column(1, [True, True], ends=True),
    ]
    _, episodes = collected(loaded)
    assert [episode.is_whole for episode in episodes.values()] == [True, False, False, False]


def test_what_does_not_belong_to_a_recording_is_refused(tmp_path: Path) -> None:
    recording, _ = recorded(tmp_path, 60)
    run, _ = a_run(tmp_path, recording)
    invoke = CliRunner().invoke
    reply = invoke(trace_commands, ["evaluate", str(recording), "--policy", str(run), *REWARDS])
    assert (reply.exit_code, "a recording has its rewards" in reply.output) == (2, True)
    reply = invoke(trace_commands, ["evaluate", str(tmp_path), "--policy", str(run)])
    assert (reply.exit_code, "so no recording" in reply.output) == (2, True)
