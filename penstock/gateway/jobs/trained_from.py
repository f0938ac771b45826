"""Which trainings have read ratings that were deleted: what a person is told who asks to be forgotten."""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from penstock.gateway.store.tables import JobRow, PolicyVersionRow


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
