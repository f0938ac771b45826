"""The queue of jobs, on each kind of database: each is taken once, and ends once."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from penstock.gateway.accounts.principal import AccountConflict, BadInput, Membership, NoSuchThing, Principal
from penstock.gateway.jobs import job_queue
from penstock.gateway.jobs.job_records import Conclusion, Job, Number, Outcome, Template
from penstock.gateway.store.tables import JobState, Role
from tests.support.gateway.small_gateway import SmallGateway

ADA = Principal(subject="user/ada", name="ada", user="ada")


def submit(
    gateway: SmallGateway, agent: str, key: str | None = None, project: str = "alpha", **numbers: float
) -> Job:
    """A new job."""
    member = Membership(principal=ADA, project=project, role=Role.EDITOR)
    return gateway.accounts.run(
        lambda session, now: job_queue.submit(
            session,
            now,
            member,
            agent=agent,
            template="quick",
            numbers=numbers,
            facts={},
            request_key=key,
        )
    )


def claim(gateway: SmallGateway, place: str, most: int = 1) -> Job | None:
    """What a runner takes."""
    return gateway.accounts.run(lambda session, now: job_queue.claim(session, now, place, most))


def settle(gateway: SmallGateway, job: Job, state: JobState, **result: Any) -> None:
    """It has ended."""
    made = Conclusion(result=result)
    gateway.accounts.run(
        lambda session, now: job_queue.settle(session, now, job.id, Outcome(state=state), made)
    )


def now(gateway: SmallGateway, job: Job) -> Job:
    """It as it is."""
    return gateway.accounts.look(lambda session: job_queue.get(session, "alpha", job.id))


def test_places_take_jobs_in_order_each_once(small_gateway: SmallGateway) -> None:
    made = [submit(small_gateway, f"agent-{number}") for number in range(6)]
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
            submit(small_gateway, f"agent-{number}", project=project)

    def begun(most: int) -> str:
        small_gateway.clock.pass_time(seconds=1)
        job = claim(small_gateway, "here", most)
        return "" if job is None else f"{job.project} {job.agent[-1]}"

    assert [begun(3) for _ in range(4)] == ["alpha 0", "beta 0", "gamma 0", ""]
    (first, *_) = small_gateway.accounts.look(lambda session: job_queue.at_place(session, "here"))
    settle(small_gateway, first, JobState.FINISHED)
    assert [begun(3), begun(4), begun(5), begun(6)] == ["alpha 1", "beta 1", "alpha 2", "alpha 3"]


def test_a_key_stands_for_one_job(small_gateway: SmallGateway) -> None:
    first = submit(small_gateway, "agent", key="k", maxSteps=2)
    assert submit(small_gateway, "agent", key="k", maxSteps=2).id == first.id
    with pytest.raises(AccountConflict, match="another job"):
        submit(small_gateway, "agent", key="k", maxSteps=3)
    with pytest.raises(AccountConflict, match="is being trained"):
        submit(small_gateway, "agent")
    assert claim(small_gateway, "here") is not None
    settle(small_gateway, first, JobState.FAILED)
    assert submit(small_gateway, "agent", key="k", maxSteps=2).state is JobState.FAILED
    assert submit(small_gateway, "agent").id != first.id
    for number in range(job_queue.MAX_OPEN - 1):
        submit(small_gateway, f"agent-{number}")
    with pytest.raises(AccountConflict, match="have not ended"):
        submit(small_gateway, "one-too-many")


def test_a_job_ends_once(small_gateway: SmallGateway) -> None:
    queued, other = submit(small_gateway, "queued"), submit(small_gateway, "other")

    def cancel(job: Job) -> Job:
        return small_gateway.accounts.run(
            lambda session, at: job_queue.cancel(session, at, "alpha", job.id, by="user/eve")
        )

    assert cancel(queued).state is JobState.CANCELLED
    taken = claim(small_gateway, "here")
    assert taken is not None
    assert taken.id == other.id
    assert (cancel(other).state, now(small_gateway, other).cancelled_by) == (JobState.RUNNING, "user/eve")
    settle(small_gateway, other, JobState.FINISHED, updates=2)
    settle(small_gateway, other, JobState.LOST)
    assert (now(small_gateway, other).state, now(small_gateway, other).result) == (
        JobState.FINISHED,
        {"updates": 2},
    )
    with pytest.raises(AccountConflict, match="finished already"):
        cancel(other)
    with pytest.raises(NoSuchThing):
        small_gateway.accounts.look(lambda session: job_queue.get(session, "beta", other.id))
    assert small_gateway.actions("alpha") == [
        "job queued",
        "job queued",
        "job cancelled",
        "job cancelled",
        "job finished",
    ]


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
def test_a_template_gives_its_numbers_and_nothing_else(said: dict[str, float], field: str) -> None:
    number = Number(settings={"learner.total_steps": 512}, least=1, most=10, default=2, whole=True)
    template = Template(name="quick", title="", numbers={"maxSteps": number})
    assert template.chosen({}) == {"maxSteps": 2}
    with pytest.raises(BadInput) as caught:
        template.chosen(said)
    assert caught.value.field == field
