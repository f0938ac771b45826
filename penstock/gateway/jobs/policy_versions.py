"""Policies that jobs trained, in the database: each function is part of a caller's transaction."""

from datetime import datetime
from typing import Final

from sqlalchemy import select
from sqlalchemy.orm import Session

from penstock.gateway.jobs.job_records import Job, TrainedVersion
from penstock.gateway.store.tables import PolicyVersionRow

MAX_READ: Final = 1000


def add(session: Session, now: datetime, job: Job, made: TrainedVersion) -> None:
    """Add what a job trained to the versions of its agent."""
    session.add(
        PolicyVersionRow(
            id=job.id,
            project=job.project,
            agent_id=job.agent,
            version=made.version,
            model_path=made.model_path,
            reward_model_path=made.reward_model_path,
            feedback_count=made.feedback_count,
            reward_mean=made.reward_mean,
            reward_std=made.reward_std,
            created_at=now,
        )
    )


def labels(session: Session, project: str, agent: str) -> frozenset[str]:
    """Return the labels of all versions of an agent."""
    own = (PolicyVersionRow.project == project) & (PolicyVersionRow.agent_id == agent)
    return frozenset(session.scalars(select(PolicyVersionRow.version).where(own)))


def find(session: Session, project: str, agent: str, label: str) -> PolicyVersionRow | None:
    """Return the version of an agent that has a label; None: there is none."""
    own = (PolicyVersionRow.project == project) & (PolicyVersionRow.agent_id == agent)
    return session.scalar(select(PolicyVersionRow).where(own, PolicyVersionRow.version == label))


def read(session: Session, project: str, agent: str) -> tuple[PolicyVersionRow, ...]:
    """Return the newest MAX_READ versions of an agent, newest first."""
    own = (PolicyVersionRow.project == project) & (PolicyVersionRow.agent_id == agent)
    newest = select(PolicyVersionRow).where(own).order_by(PolicyVersionRow.number.desc())
    return tuple(session.scalars(newest.limit(MAX_READ)))
