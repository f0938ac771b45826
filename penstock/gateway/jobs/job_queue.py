"""Jobs in the database: each function is part of a caller's transaction.

One runner takes a job, and the row names its place from then on; transactions are serialisable, so that two
gateways never take the same job.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any, Final

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session, aliased

from penstock.gateway.accounts import audit
from penstock.gateway.accounts.principal import AccountConflict, Membership, NoSuchThing, new_id
from penstock.gateway.jobs.job_records import Conclusion, Job, Outcome, TrainedVersion
from penstock.gateway.store.tables import JobRow, JobState, PolicyVersionRow

MAX_OPEN: Final = 16
"""Most jobs of a project that are queued or running."""
MAX_READ: Final = 200
_OPEN: Final = (JobState.QUEUED, JobState.RUNNING)


def submit(
    session: Session,
    now: datetime,
    member: Membership,
    *,
    agent: str,
    template: str,
    numbers: Mapping[str, float],
    facts: Mapping[str, Any],
    request_key: str | None = None,
) -> Job:
    """Queue a job; for a key that was used before, return its job.

    Raises AccountConflict where the key stands for another job, where the agent is being trained, or where
    the project has MAX_OPEN jobs.
    """
    known = _by_key(session, member.project, request_key)
    if known is not None:
        if (known.agent, known.template, known.numbers) != (agent, template, dict(numbers)):
            raise AccountConflict("this key came with another job before: a new job needs a key of its own")
        return record(known)
    _check_room(session, member.project, agent)
    row = JobRow(
        id=new_id(),
        project=member.project,
        agent=agent,
        template=template,
        numbers=dict(numbers),
        facts=dict(facts),
        request_key=request_key,
        by=member.principal.subject,
        state=JobState.QUEUED,
        cause="",
        place="",
        created=now,
    )
    session.add(row)
    _note(session, now, row, "job queued", by=row.by)
    return record(row)


def claim(session: Session, now: datetime, place: str, most: int) -> Job | None:
    """Give a runner the oldest queued job of the project whose turn it is, unless it has `most` already.

    It is that of which the fewest run, and of these the one that has waited longest since its last began: one
    project with many jobs does not keep out the others.
    """
    if len(at_place(session, place)) >= most:
        return None
    other = aliased(JobRow)
    same = other.project == JobRow.project
    running = select(func.count()).where(same, other.state == JobState.RUNNING).scalar_subquery()
    served = select(func.max(other.began)).where(same).scalar_subquery()
    queued = select(JobRow).where(JobRow.state == JobState.QUEUED)
    row = session.scalar(queued.order_by(running, served.nulls_first(), JobRow.number).limit(1))
    if row is None:
        return None
    row.state, row.place, row.began = JobState.RUNNING, place, now
    return record(row)


def at_place(session: Session, place: str) -> tuple[Job, ...]:
    own = (JobRow.state == JobState.RUNNING) & (JobRow.place == place)
    return tuple(record(row) for row in session.scalars(select(JobRow).where(own).order_by(JobRow.number)))


def open_counts(session: Session) -> dict[JobState, int]:
    counted = select(JobRow.state, func.count()).where(JobRow.state.in_(_OPEN)).group_by(JobRow.state)
    counts = dict.fromkeys(_OPEN, 0)
    for state, count in session.execute(counted):
        counts[state] = count
    return counts


def settle(session: Session, now: datetime, id_: str, outcome: Outcome, made: Conclusion | None) -> None:
    """Record how a running job has ended, and the version that it made; a settled job stays as it is."""
    row = session.scalar(select(JobRow).where(JobRow.id == id_))
    if row is None or not row.state.is_open:
        return
    row.state, row.cause, row.ended = outcome.state, outcome.cause, now
    row.result = None if made is None else dict(made.result)
    if made is not None and made.version is not None:
        add_version(session, now, record(row), made.version)
    _note(session, now, row, f"job {outcome.state}", by=row.cancelled_by or row.by)


def cancel(session: Session, now: datetime, project: str, id_: str, *, by: str) -> Job:
    """End a queued job, or mark a running one to be stopped; raises NoSuchThing, AccountConflict."""
    row = _row(session, project, id_)
    if not row.state.is_open:
        raise AccountConflict(f"the job is {row.state} already")
    if row.cancelled_by is None:
        row.cancelled_by = by
        _note(session, now, row, "job cancelled", by=by)
    if row.state is JobState.QUEUED:
        row.state, row.ended = JobState.CANCELLED, now
    return record(row)


def get(session: Session, project: str, id_: str) -> Job:
    return record(_row(session, project, id_))


def read(
    session: Session, project: str, agent: str | None = None, state: JobState | None = None
) -> tuple[Job, ...]:
    """Return the newest MAX_READ jobs of a project, newest first; of one agent, in one state."""
    wanted = select(JobRow).where(JobRow.project == project)
    if agent is not None:
        wanted = wanted.where(JobRow.agent == agent)
    if state is not None:
        wanted = wanted.where(JobRow.state == state)
    rows = session.scalars(wanted.order_by(JobRow.number.desc()).limit(MAX_READ))
    return tuple(record(row) for row in rows)


def by_key(session: Session, project: str, request_key: str | None) -> Job | None:
    row = _by_key(session, project, request_key)
    return None if row is None else record(row)


def record(row: JobRow) -> Job:
    return Job(**{name: getattr(row, name) for name in Job.__dataclass_fields__})


def _by_key(session: Session, project: str, request_key: str | None) -> JobRow | None:
    if request_key is None:
        return None
    same = (JobRow.project == project) & (JobRow.request_key == request_key)
    return session.scalar(select(JobRow).where(same))


def _check_room(session: Session, project: str, agent: str) -> None:
    is_open = (JobRow.project == project) & JobRow.state.in_(_OPEN)
    if session.scalar(select(JobRow.id).where(is_open & (JobRow.agent == agent)).limit(1)) is not None:
        raise AccountConflict("this agent is being trained: wait for that job, or cancel it")
    count = session.scalar(select(func.count()).select_from(JobRow).where(is_open)) or 0
    if count >= MAX_OPEN:
        raise AccountConflict(f"the project has {MAX_OPEN} jobs that have not ended: wait for one of them")


def _row(session: Session, project: str, id_: str) -> JobRow:
    row = session.scalar(select(JobRow).where(JobRow.id == id_))
    if row is None or row.project != project:
        raise NoSuchThing("no such job")
    return row


def _note(session: Session, now: datetime, row: JobRow, action: str, *, by: str) -> None:
    audit.note(
        session,
        now,
        by=by,
        action=action,
        project=row.project,
        subject=f"job/{row.id}",
        agent=row.agent,
        template=row.template,
    )


# ---- Policies that jobs trained.

MAX_VERSIONS: Final = 1000


def add_version(session: Session, now: datetime, job: Job, made: TrainedVersion) -> None:
    session.add(
        PolicyVersionRow(id=job.id, project=job.project, agent_id=job.agent, created_at=now, **asdict(made))
    )


def version_labels(session: Session, project: str, agent: str) -> frozenset[str]:
    return frozenset(session.scalars(select(PolicyVersionRow.version).where(_of_agent(project, agent))))


def find_version(session: Session, project: str, agent: str, label: str) -> PolicyVersionRow | None:
    return session.scalar(
        select(PolicyVersionRow).where(_of_agent(project, agent), PolicyVersionRow.version == label)
    )


def read_versions(session: Session, project: str, agent: str) -> tuple[PolicyVersionRow, ...]:
    """Return the newest MAX_VERSIONS versions of an agent, newest first."""
    newest = (
        select(PolicyVersionRow).where(_of_agent(project, agent)).order_by(PolicyVersionRow.number.desc())
    )
    return tuple(session.scalars(newest.limit(MAX_VERSIONS)))


def _of_agent(project: str, agent: str) -> ColumnElement[bool]:
    return (PolicyVersionRow.project == project) & (PolicyVersionRow.agent_id == agent)


# ---- Which trainings have read ratings that were deleted: for people whose data is deleted.


def trained_from(
    session: Session, project: str, deleted: Mapping[str, Sequence[int]]
) -> list[dict[str, Any]]:
    """Return the jobs that began while a deleted rating of their agent was there, oldest first.

    deleted: numbers of ratings by policy, `PROJECT/AGENT`. A job may have left such a rating out, as one of
    another aspect; none that read one is left out here.
    """
    first = {policy.partition("/")[2]: min(numbers) for policy, numbers in deleted.items() if numbers}
    if not first:
        return []
    began = (JobRow.project == project) & JobRow.agent.in_(first) & JobRow.began.is_not(None)
    jobs = session.scalars(select(JobRow).where(began).order_by(JobRow.number)).all()
    read = [job for job in jobs if job.facts.get("through", 0) >= first[job.agent]]
    own = PolicyVersionRow.id.in_([job.id for job in read])
    rows = session.execute(select(PolicyVersionRow.id, PolicyVersionRow.version).where(own))
    labels = dict(rows.all())
    return [
        {
            "project": project,
            "agent": job.agent,
            "job": job.id,
            "state": job.state,
            "version": labels.get(job.id),
        }
        for job in read
    ]
