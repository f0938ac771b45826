import asyncio
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from fastapi import APIRouter
from sqlalchemy.orm import Session

from penstock.gateway.accounts import users
from penstock.gateway.accounts.principal import AccountConflict, BadInput, Membership, NoSuchThing
from penstock.gateway.application import Service
from penstock.gateway.jobs import job_queue, live_jobs
from penstock.gateway.jobs.job_dispatcher import AGAIN_S, DryRunTurns
from penstock.gateway.jobs.job_records import (
    Conclusion,
    Job,
    Number,
    Outcome,
    PlainTraining,
    Template,
    TrainedVersion,
)
from penstock.gateway.jobs.live_jobs import LiveJobs
from penstock.gateway.store.tables import JobState, Role, UserRow
from penstock.launch.gateway.local_runner import LocalRunner
from penstock.launch.gateway.run_steering import RunSteering
from penstock.registry.records import NewVersion, Origin, Unavailable
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
        self.reads[job] += 1
        return super().read_log(job, begin, most)


@pytest.fixture
def gateway(database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SmallGateway:
    """One that looks often, at rights too, and whose jobs wait until a test has the dispatcher look."""
    monkeypatch.setattr(live_jobs, "RIGHTS_S", 0.0)
    monkeypatch.setattr(live_jobs, "LOOK_S", 0.01)
    runner = CountingRunner(tmp_path / "jobs", write_templates(tmp_path / "templates"))
    return SmallGateway.in_folder(tmp_path, database_url, runner=runner)


def submitted(gateway: SmallGateway, agent: str = "mine") -> str:
    """The id of a job that waits."""
    reply = gateway.client.post(
        JOBS, json={"agent": agent, "template": "quick"}, headers=gateway.token("alpha")
    )
    assert reply.status_code == 201, reply.text
    return str(reply.json()["id"])


def begun(gateway: SmallGateway, folder: Path) -> str:
    """A job that waits in the queue and has a log already; returns its id."""
    job = submitted(gateway)
    (folder / "jobs" / job).mkdir(parents=True)
    (folder / "jobs" / job / "train.log").write_text("first\n")
    return job


def member_of(gateway: SmallGateway, header: dict[str, str]) -> Membership:
    """Who sends this header, in the project."""
    principal = gateway.accounts.authenticate(header["Authorization"])
    return gateway.accounts.membership(principal, "alpha")


def live(gateway: SmallGateway) -> LiveJobs:
    return LiveJobs(gateway.accounts, gateway.parts.dispatcher)


async def event_of(stream: AsyncIterator[str]) -> dict[str, str]:
    """The fields of the next event that is no sign of life."""
    async for text in stream:
        if not text.startswith(":"):
            return dict(line.split(": ", 1) for line in text.rstrip("\n").split("\n"))
    raise AssertionError("it has ended")


async def news(stream: AsyncIterator[str]) -> tuple[str, Any]:
    """The kind and the content of the next event."""
    found = await event_of(stream)
    return found["event"], json.loads(found["data"])


async def test_a_hundred_readers_cause_one_look(
    gateway: SmallGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_jobs, "LOOK_S", 3600.0)
    dispatcher = gateway.dispatcher
    assert isinstance(dispatcher.runner, CountingRunner)
    job, member, looked = begun(gateway, tmp_path), member_of(gateway, gateway.token("alpha")), live(gateway)
    found = await asyncio.gather(*(event_of(looked.follow_log(member, job, 0)) for _ in range(READERS)))
    assert found == [{"event": "line", "id": "6", "data": '"first"'}] * READERS
    assert dispatcher.runner.reads[job] < READERS / 10
    looks, read = list[str](), job_queue.read

    def counted(*asked: Any) -> Any:
        looks.append("read")
        return read(*asked)

    monkeypatch.setattr(job_queue, "read", counted)
    told = await asyncio.gather(*(news(looked.follow(member, "")) for _ in range(READERS)))
    assert {kind for kind, _ in told} == {"jobs"}
    assert len(looks) == 1


async def test_simultaneous_readers_wake_at_different_times(
    gateway: SmallGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_jobs, "LOOK_S", 1.0)
    rests, sleep = list[float](), asyncio.sleep

    async def noted(delay_s: float) -> None:
        rests.append(delay_s)
        await sleep(0.01)

    monkeypatch.setattr(asyncio, "sleep", noted)
    job, member, looked = begun(gateway, tmp_path), member_of(gateway, gateway.token("alpha")), live(gateway)
    streams = [looked.follow_log(member, job, 0) for _ in range(READERS)]
    await asyncio.gather(*map(news, streams))
    waiting = [asyncio.ensure_future(news(one)) for one in streams]
    async with asyncio.timeout(PATIENCE_S):
        while len(rests) < READERS:
            await sleep(0.01)
    for one in waiting:
        one.cancel()
    tenths = Counter(int(delay_s * 10) for delay_s in rests)
    assert max(tenths.values()) < len(rests) / 2, tenths


@pytest.mark.parametrize("lost", ["token", "password", "sign-out", "member"])
async def test_a_reader_without_permission_gets_no_further_events(
    gateway: SmallGateway, tmp_path: Path, lost: str
) -> None:
    job = begun(gateway, tmp_path)
    gateway.person("owner", "alpha", Role.OWNER)
    gateway.person("ada", "alpha", Role.VIEWER)
    owner, ada = gateway.bearer("owner"), gateway.bearer("ada")
    member = member_of(gateway, gateway.token("alpha") if lost == "token" else ada)

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

    streams = live(gateway).follow_log(member, job, 0), live(gateway).follow(member, "")
    assert [(await news(one))[0] for one in streams] == ["line", "jobs"]
    assert await asyncio.to_thread(take_away) in {200, 204}
    for one in streams:
        assert (await news(one))[0] == "refused"
        with pytest.raises(StopAsyncIteration):
            await anext(one)


async def test_events_are_sent_when_they_change_and_never_twice(gateway: SmallGateway) -> None:
    first, member = submitted(gateway), member_of(gateway, gateway.token("alpha", Role.VIEWER))
    stream = live(gateway).follow(member, first)
    kind, content = await news(stream)
    assert (kind, [one["id"] for one in content["jobs"]]) == ("jobs", [first])
    kind, content = await news(stream)
    assert (kind, content["state"], "facts" in content) == ("job", "queued", False)
    other = await asyncio.to_thread(submitted, gateway, "yours")
    kind, content = await news(stream)
    assert (kind, {one["id"] for one in content["jobs"]}) == ("jobs", {first, other})
    gateway.accounts.run(lambda session, now: job_queue.cancel(session, now, "alpha", first, by="ada"))
    assert (await news(stream))[0] == "jobs"
    kind, content = await news(stream)
    assert (kind, content["state"]) == ("job", "cancelled")


def test_a_job_of_another_project_is_not_found(gateway: SmallGateway) -> None:
    gateway.person("bob", "beta", Role.OWNER)
    job = submitted(gateway)
    absent = gateway.get("/api/projects/beta/events?job=nothing", gateway.bearer("bob"))
    other = gateway.get(f"/api/projects/beta/events?job={job}", gateway.bearer("bob"))
    assert (other.status_code, other.json()) == (404, absent.json())


async def test_an_unavailable_registry_hides_nothing_else(gateway: SmallGateway) -> None:
    class Away(RunSteering):
        def versions(self, job: str) -> dict[str, Any]:
            raise Unavailable("the registry does not answer")

    dispatcher = gateway.dispatcher
    dispatcher.steering = Away(lambda job: dispatcher.runner.folder(job))
    job, place = submitted(gateway), dispatcher.runner.place
    gateway.accounts.run(lambda session, now: job_queue.claim(session, now, place, 1))
    stream = live(gateway).follow(member_of(gateway, gateway.token("alpha")), job)
    found = [await news(stream) for _ in range(4)]
    assert [kind for kind, _ in found] == ["jobs", "job", "curve", "trouble"]
    assert found[3][1] == {"of": "versions", "detail": "the registry does not answer"}


def claim(gateway: SmallGateway, place: str, most: int = 1) -> Job | None:
    return gateway.accounts.run(lambda session, now: job_queue.claim(session, now, place, most))


def settle(gateway: SmallGateway, job: Job, state: JobState, **result: Any) -> None:
    """It has ended."""
    made = Conclusion(result=result)
    gateway.accounts.run(
        lambda session, now: job_queue.settle(session, now, job.id, Outcome(state=state), made)
    )


def test_places_take_each_job_once_and_in_order(small_gateway: SmallGateway) -> None:
    made = [small_gateway.submit(f"agent-{number}") for number in range(6)]
    with ThreadPoolExecutor(6) as pool:
        taken = list(pool.map(lambda place: claim(small_gateway, place), [f"p{n % 3}" for n in range(6)]))
    found = [job for job in taken if job is not None]
    assert {job.id for job in found} == {job.id for job in made[:3]}
    assert sorted(job.place for job in found) == ["p0", "p1", "p2"]
    settle(small_gateway, found[0], JobState.FINISHED)
    assert [job.id for job in (claim(small_gateway, found[0].place),) if job] == [made[3].id]


def test_projects_take_turns(small_gateway: SmallGateway) -> None:
    for project, count in (("alpha", 4), ("beta", 2), ("gamma", 1)):
        for number in range(count):
            small_gateway.submit(f"agent-{number}", project=project)

    def begun(most: int) -> str:
        small_gateway.clock.pass_time(seconds=1)
        job = claim(small_gateway, "here", most)
        return "" if job is None else f"{job.project} {job.agent[-1]}"

    assert [begun(3) for _ in range(4)] == ["alpha 0", "beta 0", "gamma 0", ""]
    (first, *_) = small_gateway.accounts.look(lambda session: job_queue.at_place(session, "here"))
    settle(small_gateway, first, JobState.FINISHED)
    assert [begun(3), begun(4), begun(5), begun(6)] == ["alpha 1", "beta 1", "alpha 2", "alpha 3"]


def test_a_key_names_one_job(small_gateway: SmallGateway) -> None:
    first = small_gateway.submit("agent", key="k", numbers={"maxSteps": 2})
    assert small_gateway.submit("agent", key="k", numbers={"maxSteps": 2}).id == first.id
    with pytest.raises(AccountConflict, match="another job"):
        small_gateway.submit("agent", key="k", numbers={"maxSteps": 3})
    with pytest.raises(AccountConflict, match="is being trained"):
        small_gateway.submit("agent")
    assert claim(small_gateway, "here") is not None
    settle(small_gateway, first, JobState.FAILED)
    assert small_gateway.submit("agent", key="k", numbers={"maxSteps": 2}).state is JobState.FAILED
    assert small_gateway.submit("agent").id != first.id
    for number in range(job_queue.MAX_OPEN - 1):
        small_gateway.submit(f"agent-{number}")
    with pytest.raises(AccountConflict, match="have not ended"):
        small_gateway.submit("one-too-many")


def test_a_job_ends_once(small_gateway: SmallGateway) -> None:
    queued, other = small_gateway.submit("queued"), small_gateway.submit("other")

    def cancel(job: Job) -> Job:
        return small_gateway.accounts.run(
            lambda session, at: job_queue.cancel(session, at, "alpha", job.id, by="user/eve")
        )

    assert cancel(queued).state is JobState.CANCELLED
    taken = claim(small_gateway, "here")
    assert taken is not None
    assert taken.id == other.id
    assert (cancel(other).state, small_gateway.job(other).cancelled_by) == (JobState.RUNNING, "user/eve")
    settle(small_gateway, other, JobState.FINISHED, updates=2)
    settle(small_gateway, other, JobState.LOST)
    assert (small_gateway.job(other).state, small_gateway.job(other).result) == (
        JobState.FINISHED,
        {"updates": 2},
    )
    with pytest.raises(AccountConflict, match="finished already"):
        cancel(other)
    with pytest.raises(NoSuchThing):
        small_gateway.accounts.look(lambda session: job_queue.get(session, "beta", other.id))
    ended = ["job cancelled", "job cancelled", "job finished"]
    assert small_gateway.actions("alpha") == ["job queued", "job queued", *ended]


@pytest.mark.parametrize(
    ("said", "field"),
    [
        ({"maxSteps": 0}, "maxSteps"),
        ({"maxSteps": 11}, "maxSteps"),
        ({"maxSteps": 1.5}, "maxSteps"),
        ({"maxSteps": float("nan")}, "maxSteps"),
        ({"environment": 1}, "numbers"),
    ],
)
def test_a_template_sets_only_its_numbers(said: dict[str, float], field: str) -> None:
    number = Number(settings={"learner.total_steps": 512}, least=1, most=10, default=2, whole=True)
    template = Template(name="quick", title="", numbers={"maxSteps": number})
    assert template.chosen({}) == {"maxSteps": 2}
    with pytest.raises(BadInput) as caught:
        template.chosen(said)
    assert caught.value.field == field


class HeldRunner(LocalRunner):
    """Its dry runs end when a test says so."""

    def __init__(self, jobs: Path, templates: Path) -> None:
        super().__init__(jobs, templates)
        self.tried, self.go = threading.Semaphore(0), threading.Event()

    def estimate(
        self, template: str, numbers: Mapping[str, float], prepare: Callable[[Path], Mapping[str, Any]]
    ) -> dict[str, Any]:
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
    return HeldRunner(tmp_path / "jobs", write_templates(tmp_path / "templates"))


@pytest.fixture
def runs_gateway(tmp_path: Path, runner: HeldRunner) -> SmallGateway:
    made = SmallGateway.in_folder(tmp_path, runner=runner)
    for name, project in (("ada", "alpha"), ("bob", "beta")):
        made.person(name, project, Role.OWNER)
    return made


def asked(runs_gateway: SmallGateway, headers: dict[str, str], project: str = "alpha") -> Any:
    body = {"agent": "mine", "template": "quick"}
    return runs_gateway.client.post(f"/api/projects/{project}/estimates", json=body, headers=headers)


def test_a_project_with_endless_requests_keeps_out_nobody(
    runs_gateway: SmallGateway, runner: HeldRunner
) -> None:
    ada, bob = runs_gateway.bearer("ada"), runs_gateway.bearer("bob")
    turns = runs_gateway.dispatcher.dry_runs
    with ThreadPoolExecutor(2) as pool:
        first: Future[Any] = pool.submit(asked, runs_gateway, ada)
        assert runner.tried.acquire(timeout=60)
        second = pool.submit(asked, runs_gateway, bob, "beta")
        while not turns._waiting:
            assert not second.done(), second.result().text
        own = asked(runs_gateway, ada)
        assert (own.status_code, own.json()["error"]) == (429, "too_many"), own.text
        assert own.headers["retry-after"] == f"{AGAIN_S:g}"
        runner.go.set()
        assert [one.result().status_code for one in (first, second)] == [200, 200]


def test_a_caller_that_waits_too_long_is_told_when_to_try_again(
    runs_gateway: SmallGateway, runner: HeldRunner
) -> None:
    runs_gateway.dispatcher.dry_runs = DryRunTurns(wait_s=0.0)
    ada, bob = runs_gateway.bearer("ada"), runs_gateway.bearer("bob")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(asked, runs_gateway, ada)
        assert runner.tried.acquire(timeout=60)
        late = asked(runs_gateway, bob, "beta")
        assert (late.status_code, late.headers["retry-after"]) == (503, f"{AGAIN_S:g}"), late.text
        wrong = runs_gateway.client.post(
            "/api/projects/beta/estimates", json={"agent": "mine", "template": "none"}, headers=bob
        )
        assert (wrong.status_code, wrong.json()["field"]) == (422, "template")
        runner.go.set()
        assert first.result().status_code == 200


class Labelled(PlainTraining):
    """A training whose version gets a label."""

    def conclude(
        self, job: Job, outcome: Outcome, taken: Collection[str], *, folder: Path, models: Path
    ) -> Conclusion:
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
def names_gateway(database_url: str, tmp_path: Path) -> SmallGateway:
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "named.toml").write_text('[template]\nkind = "named"\n')
    runner = LocalRunner(tmp_path / "jobs", tmp_path / "templates")
    named = Service(router=APIRouter(), access={}, kinds={"named": Labelled()})
    return SmallGateway.in_folder(tmp_path, database_url, runner=runner, services=[named])


def finished(names_gateway: SmallGateway, editor: dict[str, str], folder: Path, versions: list[int]) -> str:
    """A job whose run has ended and has registered these versions; returns its id."""
    reply = names_gateway.client.post(JOBS, json={"agent": "my_agent", "template": "named"}, headers=editor)
    job = str(reply.json()["id"])
    run = folder / "jobs" / job / "run"
    run.mkdir(parents=True)
    for name, content in (("lock", ""), ("begun.json", '{"group": 1}'), ("ended.json", '{"code": 0}')):
        (run.parent / name).write_text(content)
    (run / "summary.json").write_text(json.dumps({"interrupted": False, "solved": True}))
    for version in versions:
        of: dict[str, Any] = {"run": f"{job}-a08df7", "update": 1, "sha256": "0" * 64, "size_bytes": 1}
        new = NewVersion(policy="alpha/my_agent", version=version, origin=Origin.FINAL, **of)
        names_gateway.registry.register(new, by="test")
    names_gateway.dispatcher.look()
    assert names_gateway.get(f"{JOBS}/{job}", editor).json()["state"] == "finished"
    return job


def test_the_newest_version_of_each_job_gets_its_label(names_gateway: SmallGateway, tmp_path: Path) -> None:
    editor = names_gateway.token("alpha")
    finished(names_gateway, editor, tmp_path, [3, 8])
    finished(names_gateway, editor, tmp_path, [])
    finished(names_gateway, editor, tmp_path, [70])
    assert names_gateway.registry.labels("alpha/my_agent") == {"v15": 8, "v17": 70}
