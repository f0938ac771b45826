"""Those that follow the jobs of a project look together, see what changes, and only as long as they may."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from penstock.gateway.accounts.principal import Membership
from penstock.gateway.jobs import job_queue, live_jobs
from penstock.gateway.jobs.live_jobs import LiveJobs
from penstock.gateway.store.tables import Role
from penstock.launch.gateway.local_runner import LocalRunner
from penstock.launch.gateway.run_steering import RunSteering
from penstock.registry.records import Unavailable
from tests.contract.gateway.test_log_streams import JOBS, member_of
from tests.support.gateway.job_templates import write_templates
from tests.support.gateway.small_gateway import SmallGateway

READERS = 100


@pytest.fixture
def gateway(database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SmallGateway:
    """One that looks often, and whose jobs wait until a test has the dispatcher look."""
    monkeypatch.setattr(live_jobs, "RIGHTS_S", 0.0)
    monkeypatch.setattr(live_jobs, "LOOK_S", 0.01)
    registry = f"sqlite:///{tmp_path}/registry.sqlite" if "sqlite" in database_url else database_url
    runner = LocalRunner(tmp_path / "jobs", write_templates(tmp_path / "templates"))
    return SmallGateway.at(database_url, registry, tmp_path, runner=runner)


def live(gateway: SmallGateway) -> LiveJobs:
    """Of its own."""
    return LiveJobs(gateway.accounts, gateway.parts.dispatcher)


def submitted(gateway: SmallGateway, agent: str) -> str:
    """The id of a job that waits."""
    reply = gateway.client.post(
        JOBS, json={"agent": agent, "template": "quick"}, headers=gateway.token("alpha")
    )
    assert reply.status_code == 201, reply.text
    return str(reply.json()["id"])


def member(gateway: SmallGateway) -> Membership:
    """A viewer of the project."""
    return member_of(gateway, gateway.token("alpha", Role.VIEWER))


async def news(stream: AsyncIterator[str]) -> tuple[str, Any]:
    """The next event that is no sign of life: its kind and content."""
    async for text in stream:
        if not text.startswith(":"):
            kind, data = text.rstrip("\n").split("\n")
            return kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))
    raise AssertionError("it has ended")


def test_what_changes_is_sent_and_nothing_twice(gateway: SmallGateway) -> None:
    gateway.person("ada", "alpha", Role.OWNER)
    first = submitted(gateway, "mine")

    def end() -> None:
        gateway.accounts.run(lambda session, now: job_queue.cancel(session, now, "alpha", first, by="ada"))

    async def listen() -> None:
        stream = live(gateway).follow(member(gateway), first)
        kind, content = await news(stream)
        assert (kind, [one["id"] for one in content["jobs"]]) == ("jobs", [first])
        kind, content = await news(stream)
        assert (kind, content["state"], "facts" in content) == ("job", "queued", False)
        other = await asyncio.to_thread(submitted, gateway, "yours")
        kind, content = await news(stream)
        assert (kind, {one["id"] for one in content["jobs"]}) == ("jobs", {first, other})
        await asyncio.to_thread(end)
        assert (await news(stream))[0] == "jobs"
        kind, content = await news(stream)
        assert (kind, content["state"]) == ("job", "cancelled")

    asyncio.run(listen())


def test_a_job_of_another_project_is_not_there(gateway: SmallGateway) -> None:
    gateway.person("bob", "beta", Role.OWNER)
    job = submitted(gateway, "mine")
    absent = gateway.get("/api/projects/beta/events?job=nothing", gateway.bearer("bob"))
    other = gateway.get(f"/api/projects/beta/events?job={job}", gateway.bearer("bob"))
    assert (other.status_code, other.json()) == (404, absent.json())


def test_a_hundred_readers_look_once(gateway: SmallGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_jobs, "LOOK_S", 3600.0)
    submitted(gateway, "mine")
    who, looked, looks = member(gateway), live(gateway), list[str]()
    read = job_queue.read

    def counted(*asked: Any) -> Any:
        looks.append("read")
        return read(*asked)

    monkeypatch.setattr(job_queue, "read", counted)

    async def listen() -> None:
        found = await asyncio.gather(*(news(looked.follow(who, "")) for _ in range(READERS)))
        assert {kind for kind, _ in found} == {"jobs"}

    asyncio.run(listen())
    assert len(looks) == 1


def test_who_is_no_member_any_more_is_told_nothing_more(gateway: SmallGateway) -> None:
    gateway.person("owner", "alpha", Role.OWNER)
    gateway.person("ada", "alpha", Role.VIEWER)
    submitted(gateway, "mine")
    who = member_of(gateway, gateway.bearer("ada"))
    path = f"/api/projects/alpha/members/{gateway.people['ada']}"

    async def listen() -> None:
        stream = live(gateway).follow(who, "")
        assert (await news(stream))[0] == "jobs"
        gone = await asyncio.to_thread(gateway.client.delete, path, headers=gateway.bearer("owner"))
        assert gone.status_code in {200, 204}
        assert (await news(stream))[0] == "refused"
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    asyncio.run(listen())


def test_a_registry_that_does_not_answer_hides_nothing_else(gateway: SmallGateway) -> None:
    class Away(RunSteering):
        def versions(self, job: str) -> dict[str, Any]:
            raise Unavailable("the registry does not answer")

    dispatcher = gateway.parts.dispatcher
    assert dispatcher is not None
    dispatcher.steering = Away(lambda job: dispatcher.runner.folder(job))
    job = submitted(gateway, "mine")
    place = dispatcher.runner.place
    gateway.accounts.run(lambda session, now: job_queue.claim(session, now, place, 1))

    async def listen() -> None:
        stream = live(gateway).follow(member(gateway), job)
        found = [await news(stream) for _ in range(4)]
        assert [kind for kind, _ in found] == ["jobs", "job", "curve", "trouble"]
        assert found[3][1] == {"of": "versions", "detail": "the registry does not answer"}

    asyncio.run(listen())
