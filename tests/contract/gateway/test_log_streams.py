"""Those that follow a job's log look together, and only as long as they may."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.orm import Session

from penstock.gateway.accounts import users
from penstock.gateway.accounts.principal import Membership
from penstock.gateway.jobs import live_jobs
from penstock.gateway.jobs.live_jobs import LiveJobs
from penstock.gateway.store.tables import Role, UserRow
from penstock.launch.gateway.local_runner import LocalRunner
from tests.support.gateway.job_templates import write_templates
from tests.support.gateway.small_gateway import SmallGateway

JOBS = "/api/projects/alpha/jobs"
READERS = 100
PATIENCE_S = 60.0


class CountingRunner(LocalRunner):
    """Counts how often it is asked for a log."""

    def __init__(self, jobs: Path, templates: Path) -> None:
        super().__init__(jobs, templates)
        self.reads = Counter[str]()

    def read_log(self, job: str, begin: int, most: int) -> bytes:
        """As ever."""
        self.reads[job] += 1
        return super().read_log(job, begin, most)


@pytest.fixture
def gateway(database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SmallGateway:
    """One in which rights are looked at each time, with a job that goes on."""
    monkeypatch.setattr(live_jobs, "RIGHTS_S", 0.0)
    registry = f"sqlite:///{tmp_path}/registry.sqlite" if "sqlite" in database_url else database_url
    runner = CountingRunner(tmp_path / "jobs", write_templates(tmp_path / "templates"))
    return SmallGateway.at(database_url, registry, tmp_path, runner=runner)


def begun(gateway: SmallGateway, folder: Path) -> str:
    """A job that waits in the queue and has a log already; returns its id."""
    reply = gateway.client.post(
        JOBS, json={"agent": "mine", "template": "quick"}, headers=gateway.token("alpha")
    )
    job = str(reply.json()["id"])
    (folder / "jobs" / job).mkdir(parents=True)
    (folder / "jobs" / job / "train.log").write_text("first\n")
    return job


def member_of(gateway: SmallGateway, header: dict[str, str]) -> Membership:
    """Who sends this header, in the project."""
    principal = gateway.accounts.authenticate(header["Authorization"])
    return gateway.accounts.membership(principal, "alpha")


def following(gateway: SmallGateway, member: Membership, job: str) -> AsyncIterator[str]:
    """The stream."""
    live: LiveJobs = gateway.client.app.state.live  # type: ignore[attr-defined]
    return live.follow_log(member, job, 0)


async def next_news(stream: AsyncIterator[str]) -> dict[str, Any]:
    """The next event that is no sign of life."""
    async for text in stream:
        if not text.startswith(":"):
            kind, number, data = text.rstrip("\n").split("\n")
            return {"kind": kind[7:], "id": int(number[4:]), "data": json.loads(data[6:])}
    raise AssertionError("it has ended")


def test_a_hundred_readers_look_once(
    gateway: SmallGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_jobs, "LOOK_S", 3600.0)
    job, runner = begun(gateway, tmp_path), gateway.parts.dispatcher.runner  # type: ignore[union-attr]
    member = member_of(gateway, gateway.token("alpha"))

    async def listen() -> None:
        streams = [following(gateway, member, job) for _ in range(READERS)]
        found = await asyncio.gather(*map(next_news, streams))
        assert found == [{"kind": "line", "id": 6, "data": "first"}] * READERS
        assert isinstance(runner, CountingRunner)
        assert runner.reads[job] < READERS / 10

    asyncio.run(listen())


def test_readers_that_look_together_do_not_wake_together(
    gateway: SmallGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_jobs, "LOOK_S", 1.0)
    rests, sleep = list[float](), asyncio.sleep

    async def noted(delay_s: float) -> None:
        rests.append(delay_s)
        await sleep(0.01)

    monkeypatch.setattr(asyncio, "sleep", noted)
    job = begun(gateway, tmp_path)
    member = member_of(gateway, gateway.token("alpha"))

    async def listen() -> None:
        streams = [following(gateway, member, job) for _ in range(READERS)]
        await asyncio.gather(*map(next_news, streams))
        waiting = [asyncio.ensure_future(next_news(one)) for one in streams]
        async with asyncio.timeout(PATIENCE_S):
            while len(rests) < READERS:
                await sleep(0.01)
        for one in waiting:
            one.cancel()

    asyncio.run(listen())
    tenths = Counter(int(delay_s * 10) for delay_s in rests)
    assert max(tenths.values()) < len(rests) / 2, tenths


@pytest.mark.parametrize("lost", ["token", "password", "sign-out", "member"])
def test_who_may_read_no_more_reads_no_more(
    gateway: SmallGateway, tmp_path: Path, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_jobs, "LOOK_S", 0.01)
    job = begun(gateway, tmp_path)
    gateway.person("owner", "alpha", Role.OWNER)
    gateway.person("ada", "alpha", Role.VIEWER)
    owner, ada = gateway.bearer("owner"), gateway.bearer("ada")
    header = gateway.token("alpha") if lost == "token" else ada
    member = member_of(gateway, header)

    def take_away() -> Any:
        match lost:
            case "token":
                path = f"/api/projects/alpha/tokens/{member.principal.subject.partition('/')[2]}"
                return gateway.client.delete(path, headers=owner).status_code
            case "password":
                return gateway.accounts.run(change_password)
            case "sign-out":
                return gateway.client.post("/api/auth/sign-out", headers=ada).status_code
            case _:
                path = f"/api/projects/alpha/members/{gateway.people['ada']}"
                return gateway.client.delete(path, headers=owner).status_code

    def change_password(session: Session, now: datetime) -> int:
        row = session.get(UserRow, gateway.people["ada"])
        assert row is not None
        users.change_password(session, now, row, password="another", by="test")  # noqa: S106 - no hash
        return 204

    async def listen() -> None:
        stream = following(gateway, member, job)
        assert (await next_news(stream))["data"] == "first"
        assert await asyncio.to_thread(take_away) in {200, 204}
        assert (await next_news(stream))["kind"] == "refused"
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    asyncio.run(listen())
