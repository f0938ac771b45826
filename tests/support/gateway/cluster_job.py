"""A job that a gateway has taken from its queue, for tests of a runner by itself."""

from datetime import UTC, datetime

from penstock.gateway.jobs.job_records import Job
from penstock.gateway.store.tables import JobState


def taken_job(template: str = "quick", steps: int = 2) -> Job:
    """One of a template of `job_templates`."""
    now = datetime.now(UTC)
    return Job(
        id="0" * 24,
        project="alpha",
        agent="agent-",
        template=template,
        numbers={"maxSteps": steps, "learningRate": 3e-4} if template == "quick" else {},
        facts={},
        by="user/ada",
        state=JobState.RUNNING,
        cause="",
        place="here",
        cancelled_by=None,
        result=None,
        created=now,
        began=now,
        ended=None,
    )
