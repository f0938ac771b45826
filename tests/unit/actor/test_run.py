"""What an actor takes from a specification, what it decides itself, and what it refuses."""

from dataclasses import replace
from typing import Any

import pytest

from actor import run
from penstock.runtime.exit import Fatal
from penstock.runtime.settings import ActorSection, ConfigurationError, EnvironmentSection
from penstock.wire.specification import RunSpecification
from tests import small_run
from workloads.control.environment import spaces


def specification(**changes: Any) -> RunSpecification:
    """CartPole."""
    observation, action = spaces(EnvironmentSection())
    return replace(small_run.specification(), observation_space=observation, action_space=action, **changes)


def test_sections_come_from_the_specification() -> None:
    """This process needs no configuration of its own."""
    read = run.read(specification(environment_json='{"count":3}', actor_json='{"threads":2}'), ActorSection())
    assert read.environment.count == 3
    assert read.actor.threads == 2
    assert read.workload.name == "control"


def test_a_process_sets_its_own_threads_outbox_and_timeout_only(caplog: pytest.LogCaptureFixture) -> None:
    """What shapes the experience is the run's; who sets it elsewhere is told."""
    local = ActorSection(threads=4, outbox_fragments=2, stall_timeout_s=9, unroll_length=7, compress="off")
    read = run.read(specification(actor_json='{"threads":2,"unroll_length":32}'), local)
    assert (read.actor.threads, read.actor.outbox_fragments, read.actor.stall_timeout_s) == (4, 2, 9)
    assert read.actor.unroll_length == 32
    assert [record.__dict__["key"] for record in caplog.records] == ["actor.unroll_length"]


def test_an_unknown_workload_is_named() -> None:
    """With those installed."""
    with pytest.raises(ConfigurationError, match="workload='chess'.*control"):
        run.read(specification(workload="chess"), ActorSection())


def test_a_section_of_another_version_is_named() -> None:
    """An unknown key means another penstock wrote it."""
    with pytest.raises(Fatal, match="section policy.*same version"):
        run.read(specification(policy_json='{"colour":1}'), ActorSection())


def test_the_specification_cannot_allow_a_module_itself() -> None:
    """Only this process can."""
    text = '{"allow_modules":["os"]}'
    with pytest.raises(ConfigurationError, match="allow_modules"):
        run.read(specification(environment_json='{"id":"os:X-v0"}', actor_json=text), ActorSection())
