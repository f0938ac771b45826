"""Routes by which a program gives feedback on an agent's answers and has a policy trained from it.

    POST /api/policies/feedback/{agent_id}        is the gateway's own
    POST /api/policies/train_policy/{agent_id}    a dry run, or a training that is waited for
    GET  /api/policies/{agent_id}                 what was trained

A training is a job: who does not want to wait says `Prefer: wait=N`, and gets its address after N seconds.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Header, Request, Response
from fastapi.responses import JSONResponse
from pydantic import field_validator
from pydantic_core import PydanticCustomError
from starlette.concurrency import run_in_threadpool

from penstock.gateway.accounts.principal import Membership
from penstock.gateway.application import Service
from penstock.gateway.frame.api_errors import ApiError
from penstock.gateway.frame.requests import Answer, Body, Line, answers, example
from penstock.gateway.frame.route_access import Access, GuardedRoute, Member, parts_of
from penstock.gateway.jobs.job_records import Job
from penstock.gateway.routes.description_routes import error_answer
from penstock.gateway.routes.feedback_routes import AgentId, Key
from penstock.gateway.routes.job_routes import ended, estimated, queue, version_of, versions_of
from penstock.gateway.store.tables import JobState
from penstock.workloads.rlhf.feedback_training import KIND, REUSED, REUSED_PLACE, FeedbackTraining

# ---- Answers about trainings and policies, as the document describes them, in the service's own names.


class TrainedPolicy(Answer):
    """A training that has finished. trainingSteps: updates that were done.

    rewardMean, rewardStd: of answers to prompts that were held out, by the reward model; null: none were.
    """

    status: Literal["trained"]
    policyId: str  # noqa: N815 - as callers of the service know it
    version: str
    modelPath: str  # noqa: N815
    rewardModelPath: str  # noqa: N815
    feedbackCount: int  # noqa: N815
    trainingSteps: int | None  # noqa: N815
    rewardMean: float | None  # noqa: N815
    rewardStd: float | None  # noqa: N815


class TrainingEstimate(Answer):
    """What a training would take, and what its feedback says. scoreMean, scoreStd: null for pairs alone."""

    dry_run: Literal[True]
    feedbackCount: int  # noqa: N815
    estimatedSteps: int  # noqa: N815
    estimatedTimeMinutes: float  # noqa: N815
    scoreMean: float | None  # noqa: N815
    scoreStd: float | None  # noqa: N815
    modelConfig: dict[str, Any]  # noqa: N815


class TrainingGoesOn(Answer):
    """A training that has not ended. job: the address at which it is asked after."""

    status: JobState
    policyId: str  # noqa: N815
    job: str


class PolicyMetrics(Answer):
    """What the reward model says of a policy's answers to prompts that were held out."""

    rewardMean: float | None  # noqa: N815
    rewardStd: float | None  # noqa: N815


class Policy(Answer):
    """A trained version of an agent."""

    id: str
    agentId: str  # noqa: N815
    version: str
    modelPath: str  # noqa: N815
    rewardModelPath: str  # noqa: N815
    feedbackCount: int  # noqa: N815
    metrics: PolicyMetrics
    createdAt: datetime  # noqa: N815


router = APIRouter(route_class=GuardedRoute, tags=["policies"])

WAIT_S: Final = 600.0
MAX_WAIT_S: Final = 3600.0
_WAIT: Final = re.compile(r"(?:^|[,;\s])wait=(\d{1,6})(?:$|[,;\s])")


class TrainingRequest(Body):
    """What is asked of a training.

    maxSteps: updates of the policy at most. learningRate: of the policy. preset: name of a template of the
    gateway. Numbers that are left out are those of the template. rewardModel: label of a version of the same
    agent, whose reward model is used again; left out, one is trained from the feedback.
    """

    model_config = example(maxSteps=1000, learningRate=1e-5)

    dryRun: bool = False  # noqa: N815 - as callers of the service know it
    maxSteps: int | None = None  # noqa: N815
    learningRate: float | None = None  # noqa: N815
    preset: Line = KIND
    rewardModel: Line | None = None  # noqa: N815

    @field_validator("maxSteps", "learningRate", mode="before")
    @classmethod
    def _is_no_truth(cls, said: Any) -> Any:
        # A text of digits is taken, as by the service that callers know; true was a training of one step.
        if isinstance(said, bool):
            raise PydanticCustomError("no_number", "must be a number, neither true nor false")
        return said

    def numbers(self) -> dict[str, float]:
        said = {"maxSteps": self.maxSteps, "learningRate": self.learningRate}
        return {name: value for name, value in said.items() if value is not None}


@router.post(
    "/api/policies/train_policy/{agent_id}",
    response_model=None,
    responses={
        200: {"model": TrainedPolicy | TrainingEstimate},
        202: {"model": TrainingGoesOn, "description": "It goes on: the job is at the address in `Location`."},
        500: error_answer("The training failed; `detail` is its cause."),
    },
)
async def train_policy(
    request: Request,
    member: Member,
    agent_id: AgentId,
    body: TrainingRequest,
    prefer: Annotated[str, Header(max_length=256)] = "",
    idempotency_key: Annotated[Key | None, Header()] = None,
) -> Response | dict[str, Any]:
    """Train a policy from an agent's feedback and answer when it is trained, or say what it would take.

    With an `Idempotency-Key` the same request again is about the same training.
    """
    asked = await run_in_threadpool(_reused, request, member, agent_id, body.rewardModel)
    if body.dryRun:
        return await _dry_run(request, member, agent_id, body, asked)
    with _named_preset():
        job = await run_in_threadpool(
            queue,
            parts_of(request),
            member,
            agent=agent_id,
            template=body.preset,
            numbers=body.numbers(),
            kind=KIND,
            request_key=idempotency_key,
            asked=asked,
        )
    return _answer(await ended(request, job, _wait_s(prefer)))


@router.get("/api/policies/{agent_id}", responses=answers(list[Policy]))
def policies(request: Request, member: Member, agent_id: AgentId) -> list[dict[str, Any]]:
    """Return the trained versions of an agent, newest first."""
    return [
        {
            "id": one.id,
            "agentId": one.agent_id,
            "version": one.version,
            "modelPath": one.model_path,
            "rewardModelPath": one.reward_model_path,
            "feedbackCount": one.feedback_count,
            "metrics": {"rewardMean": one.reward_mean, "rewardStd": one.reward_std},
            "createdAt": one.created_at,
        }
        for one in versions_of(request, member, agent_id)
    ]


def service() -> Service:
    """Return what this workload adds to a gateway."""
    access = {
        ("POST", "/api/policies/train_policy/{agent_id}"): Access.EDITOR,
        ("GET", "/api/policies/{agent_id}"): Access.VIEWER,
    }
    return Service(router=router, access=access, kinds={KIND: FeedbackTraining()})


def _reused(request: Request, member: Membership, agent: str, label: str | None) -> dict[str, str | None]:
    """Return the facts by which a training uses the reward model of a version; raises ApiError."""
    if label is None:
        return {REUSED: None, REUSED_PLACE: None}
    found = version_of(request, member, agent, label)
    if found is None:
        raise ApiError(422, "this agent has no version of that label", field="rewardModel")
    if not Path(found.reward_model_path).is_dir():
        raise ApiError(409, "the files of that version are not here any more", field="rewardModel")
    return {REUSED: label, REUSED_PLACE: found.reward_model_path}


async def _dry_run(
    request: Request, member: Membership, agent: str, body: TrainingRequest, asked: dict[str, str | None]
) -> dict[str, Any]:
    with _named_preset():
        found = await estimated(
            request,
            member,
            agent=agent,
            template=body.preset,
            kind=KIND,
            numbers=body.numbers(),
            asked=asked,
        )
    return {
        "dry_run": True,
        "feedbackCount": found.facts["feedbackCount"],
        "estimatedSteps": found.numbers["maxSteps"],
        "estimatedTimeMinutes": round(found.dry_run["seconds"] / 60, 2),
        "scoreMean": found.facts["scoreMean"],
        "scoreStd": found.facts["scoreStd"],
        "modelConfig": {**found.model, **found.numbers},
    }


@contextmanager
def _named_preset() -> Iterator[None]:
    """Have an error name the field by which these callers say a template."""
    try:
        yield
    except ApiError as error:
        if error.field == "template":
            raise ApiError(error.status_code, error.detail, field="preset") from error
        raise


def _answer(job: Job) -> Response | dict[str, Any]:
    if job.state is JobState.FINISHED:
        return {"status": "trained", "policyId": job.id, **(job.result or {})}
    if job.state is JobState.CANCELLED:
        raise ApiError(409, "the training was cancelled", error="cancelled")
    if not job.state.is_open:
        raise ApiError(500, job.cause or "the training failed", error="training_failed")
    place = f"/api/projects/{job.project}/jobs/{job.id}"
    content = {"status": job.state, "policyId": job.id, "job": place}
    return JSONResponse(content, status_code=202, headers={"Location": place})


def _wait_s(prefer: str) -> float:
    found = _WAIT.search(prefer)
    return WAIT_S if found is None else min(float(found[1]), MAX_WAIT_S)
