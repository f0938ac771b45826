"""What an actor takes from a specification, what it decides itself, and what it refuses."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.actor import specification as run
from penstock.actor.specification import policy_maker
from penstock.config.settings import ActorSection, ConfigurationError, EnvironmentSection
from penstock.policy.actor_critic import CustomBody
from penstock.policy.policy import Policy
from penstock.protocol.specification import RunSpecification
from penstock.runtime.exit import Fatal
from penstock.workloads.control.environment import spaces
from tests.support.run import small_run


def specification(**changes: Any) -> RunSpecification:
    """CartPole."""
    observation, action = spaces(EnvironmentSection())
    return replace(small_run.specification(), observation_space=observation, action_space=action, **changes)


def test_sections_come_from_the_specification() -> None:
    read = run.read(specification(environment_json='{"count":3}', actor_json='{"threads":2}'), ActorSection())
    assert read.environment.count == 3
    assert read.actor.threads == 2
    assert read.workload.name == "control"


def test_a_process_sets_its_own_threads_outbox_and_timeout_only(caplog: pytest.LogCaptureFixture) -> None:
    local = ActorSection(threads=4, outbox_fragments=2, stall_timeout_s=9, unroll_length=7, compress="off")
    read = run.read(specification(actor_json='{"threads":2,"unroll_length":32}'), local)
    assert (read.actor.threads, read.actor.outbox_fragments, read.actor.stall_timeout_s) == (4, 2, 9)
    assert read.actor.unroll_length == 32
    assert [record.__dict__["key"] for record in caplog.records] == ["actor.unroll_length"]


def test_an_unknown_workload_is_named() -> None:
    with pytest.raises(ConfigurationError, match="workload='chess'.*control"):
        run.read(specification(workload="chess"), ActorSection())


def test_a_section_of_another_version_is_named() -> None:
    with pytest.raises(Fatal, match="section policy.*same version"):
        run.read(specification(policy_json='{"colour":1}'), ActorSection())


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module that can be imported here and holds a network."""
    (tmp_path / "stranger.py").write_text("from tests.unit.penstock.policy.own_networks import Good\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "stranger"
    sys.modules.pop("stranger", None)


@pytest.mark.parametrize(
    "asked",
    [
        {"environment_json": '{"id":"stranger:X-v0"}'},
        {"policy_json": '{"network":"stranger:Good"}'},
    ],
    ids=["environment", "network"],
)
def test_the_specification_cannot_allow_a_module_itself(stranger: str, asked: dict[str, str]) -> None:
    text = '{"allow_modules":["stranger"]}'
    with pytest.raises(ConfigurationError, match=r"asks this process to import 'stranger'.*allow_modules"):
        run.read(specification(actor_json=text, **asked), ActorSection())
    assert stranger not in sys.modules


@pytest.mark.parametrize(
    ("environment_id", "key"),
    [
        ("Chat-v0", "reward"),
        ("Prompts-v0", "reward_source"),
        ("Traces-v0", "trace_file"),
        ("Chat-v0", "model"),
    ],
)
@pytest.mark.parametrize("workload", ["control", "chat", "rlhf"])
def test_a_place_of_an_environment_is_none_of_the_specification(
    stranger: str, workload: str, environment_id: str, key: str
) -> None:
    text = json.dumps({"id": environment_id, "kwargs": {key: f"{stranger}:Good"}})
    with pytest.raises(ConfigurationError, match=rf"environment\.kwargs\.{key}: .*actor\.places\.{key}"):
        run.read(specification(workload=workload, environment_json=text), ActorSection())
    assert stranger not in sys.modules


def test_who_only_serves_or_exports_imports_no_network_either(stranger: str) -> None:
    asked = specification(policy_json='{"network":"stranger:Good"}')
    with pytest.raises(ConfigurationError, match=r"policy\.network='stranger:Good'.*allow_modules"):
        policy_maker(asked)
    assert stranger not in sys.modules
    assert isinstance(policy_maker(asked, ActorSection(allow_modules=(stranger,)))().actor_body, CustomBody)
    allowed = run.read(asked, ActorSection(allow_modules=(stranger,)))
    acting = allowed.make_policy(0).policy
    assert isinstance(acting, Policy)
    assert isinstance(acting.actor_body, CustomBody)
