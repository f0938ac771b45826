"""A version that a job exported is known in the registry, and so to servers, by its label."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from fastapi import APIRouter

from penstock.gateway.application import Service
from penstock.gateway.jobs.job_records import Conclusion, Job, Outcome, PlainTraining, TrainedVersion
from penstock.launch.gateway.local_runner import LocalRunner
from penstock.registry.records import NewVersion, Origin
from tests.support.gateway.small_gateway import SmallGateway

JOBS = "/api/projects/alpha/jobs"


class Labelled(PlainTraining):
    """A training whose version gets a label."""

    def conclude(
        self, job: Job, outcome: Outcome, taken: Collection[str], *, folder: Path, models: Path
    ) -> Conclusion:
        """What it came to."""
        made = TrainedVersion(
            version=f"v{15 + len(taken)}",
            model_path="models/policy",
            reward_model_path="models/reward",
            feedback_count=15,
            reward_mean=0.5,
            reward_std=0.1,
        )
        return Conclusion(result={}, version=made)


@pytest.fixture
def gateway(database_url: str, tmp_path: Path) -> SmallGateway:
    """One whose dispatcher looks when a test says so."""
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "named.toml").write_text('[template]\nkind = "named"\n')
    registry = f"sqlite:///{tmp_path}/registry.sqlite" if "sqlite" in database_url else database_url
    runner = LocalRunner(tmp_path / "jobs", tmp_path / "templates")
    named = Service(router=APIRouter(), access={}, kinds={"named": Labelled()})
    return SmallGateway.at(database_url, registry, tmp_path, runner=runner, services=[named])


def finished(gateway: SmallGateway, editor: dict[str, str], folder: Path, versions: list[int]) -> str:
    """A job whose run has ended and has registered these versions; returns its id."""
    reply = gateway.client.post(JOBS, json={"agent": "my_agent", "template": "named"}, headers=editor)
    job = str(reply.json()["id"])
    run = folder / "jobs" / job / "run"
    run.mkdir(parents=True)
    for name, content in (("lock", ""), ("begun.json", '{"group": 1}'), ("ended.json", '{"code": 0}')):
        (run.parent / name).write_text(content)
    (run / "summary.json").write_text(json.dumps({"interrupted": False, "solved": True}))
    for version in versions:
        of: dict[str, Any] = {"run": f"{job}-a08df7", "update": 1, "sha256": "0" * 64, "size_bytes": 1}
        new = NewVersion(policy="alpha/my_agent", version=version, origin=Origin.FINAL, **of)
        gateway.registry.register(new, by="test")
    assert gateway.parts.dispatcher is not None
    gateway.parts.dispatcher.look()
    assert gateway.get(f"{JOBS}/{job}", editor).json()["state"] == "finished"
    return job


def test_the_newest_version_of_each_job_gets_its_label(gateway: SmallGateway, tmp_path: Path) -> None:
    editor = gateway.token("alpha")
    finished(gateway, editor, tmp_path, [3, 8])
    finished(gateway, editor, tmp_path, [])
    finished(gateway, editor, tmp_path, [70])
    assert gateway.registry.labels("alpha/my_agent") == {"v15": 8, "v17": 70}
