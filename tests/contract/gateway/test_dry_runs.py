"""Dry runs by HTTP: who asks while another one goes on waits, and is told why where that takes too long."""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from penstock.gateway.jobs.job_dispatcher import AGAIN_S, DryRunTurns
from penstock.gateway.store.tables import Role
from penstock.launch.gateway.local_runner import LocalRunner
from tests.support.gateway.job_templates import write_templates
from tests.support.gateway.small_gateway import SmallGateway


class HeldRunner(LocalRunner):
    """Its dry runs end when a test says so."""

    def __init__(self, jobs: Path, templates: Path) -> None:
        super().__init__(jobs, templates)
        self.tried, self.go = threading.Semaphore(0), threading.Event()

    def estimate(
        self, template: str, numbers: Mapping[str, float], prepare: Callable[[Path], Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Figures, later."""
        self.tried.release()
        assert self.go.wait(60)
        return {
            "environment": "", "workload": "", "seed": 1, "total_steps": 1, "seconds": 2.0,
            "preparation_seconds": 1.0, "measured": None, "memory_bytes": 1, "memory_bytes_by_role": {},
            "device_memory_bytes": None, "available": {"memory_bytes": 1, "device_memory_bytes": None},
            "scores": {},
        }  # fmt: skip


@pytest.fixture
def runner(tmp_path: Path) -> HeldRunner:
    """Of the gateway."""
    return HeldRunner(tmp_path / "jobs", write_templates(tmp_path / "templates"))


@pytest.fixture
def gateway(tmp_path: Path, runner: HeldRunner) -> SmallGateway:
    """One with an owner in each of two projects."""
    url, registry = (f"sqlite:///{tmp_path}/{name}.sqlite" for name in ("accounts", "registry"))
    made = SmallGateway.at(url, registry, tmp_path, runner=runner)
    for name, project in (("ada", "alpha"), ("bob", "beta")):
        made.person(name, project, Role.OWNER)
    return made


def asked(gateway: SmallGateway, headers: dict[str, str], project: str = "alpha") -> Any:
    """The answer to a wish for a dry run."""
    body = {"agent": "mine", "template": "quick"}
    return gateway.client.post(f"/api/projects/{project}/estimates", json=body, headers=headers)


def test_a_project_that_asks_without_end_keeps_out_nobody(gateway: SmallGateway, runner: HeldRunner) -> None:
    ada, bob = gateway.bearer("ada"), gateway.bearer("bob")
    turns = dispatcher_turns(gateway)
    with ThreadPoolExecutor(2) as pool:
        first: Future[Any] = pool.submit(asked, gateway, ada)
        assert runner.tried.acquire(timeout=60)
        second = pool.submit(asked, gateway, bob, "beta")
        while not turns._waiting:
            assert not second.done(), second.result().text
        own = asked(gateway, ada)
        assert (own.status_code, own.json()["error"]) == (429, "too_many"), own.text
        assert own.headers["retry-after"] == f"{AGAIN_S:g}"
        runner.go.set()
        assert [one.result().status_code for one in (first, second)] == [200, 200]


def test_who_waits_in_vain_is_told_when_to_ask_again(gateway: SmallGateway, runner: HeldRunner) -> None:
    assert gateway.parts.dispatcher is not None
    gateway.parts.dispatcher.dry_runs = DryRunTurns(wait_s=0.0)
    ada, bob = gateway.bearer("ada"), gateway.bearer("bob")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(asked, gateway, ada)
        assert runner.tried.acquire(timeout=60)
        late = asked(gateway, bob, "beta")
        assert (late.status_code, late.headers["retry-after"]) == (503, f"{AGAIN_S:g}"), late.text
        wrong = gateway.client.post(
            "/api/projects/beta/estimates", json={"agent": "mine", "template": "none"}, headers=bob
        )
        assert (wrong.status_code, wrong.json()["field"]) == (422, "template")
        runner.go.set()
        assert first.result().status_code == 200


def dispatcher_turns(gateway: SmallGateway) -> DryRunTurns:
    """Of its dry runs."""
    assert gateway.parts.dispatcher is not None
    return gateway.parts.dispatcher.dry_runs
