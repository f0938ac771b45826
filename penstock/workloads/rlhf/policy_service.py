"""Routes that train policies from the feedback on an agent's answers, and list them.

    POST /api/policies/feedback/{agent_id}        is the gateway's own
    POST /api/policies/train_policy/{agent_id}    a dry run, or a training, whose end it awaits
    GET  /api/policies/{agent_id}                 the trained versions

A training is a job. With `Prefer: wait=N` the call returns the job's address after N seconds. The job reads
the agent's feedback, and writes

    MODELS/PROJECT/AGENT/v15/    policy, reward_model, training_results.json; base_model where the run made
                                 it, which both models name from this folder, so that it may be moved

The label is `v` and the number of ratings; a further version of as many ratings is `v15.2`. A training that
reuses a reward model copies it: no version needs another one's folder.
"""

import errno
import itertools
import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from statistics import fmean, pstdev
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Header, Request, Response
from fastapi.responses import JSONResponse
from pydantic import field_validator
from pydantic_core import PydanticCustomError
from starlette.concurrency import run_in_threadpool

from penstock.config.algorithm_sections import TokenPPOSection
from penstock.config.run_folder import NoPlainFile, open_regular, opener, read_whole
from penstock.gateway.accounts.principal import Membership
from penstock.gateway.application import Service
from penstock.gateway.frame.requests import Answer, ApiError, Body, Line, example
from penstock.gateway.frame.route_access import GuardedRoute, Member, parts_of, table
from penstock.gateway.jobs import job_queue
from penstock.gateway.jobs.job_records import Conclusion, Job, Outcome, TrainedVersion, finite
from penstock.gateway.routes.console_routes import error_answer
from penstock.gateway.routes.feedback_routes import AgentId, Key, ratings_of
from penstock.gateway.routes.job_routes import ended, estimated, queue
from penstock.gateway.store.tables import JobState
from penstock.registry.ratings import KeptRating, Rating
from penstock.registry.registry import Registry
from penstock.runtime.output_file import sync_folder
from penstock.workloads.rlhf.preparation import (
    BASE_MODEL,
    BESIDE,
    FEEDBACK,
    MANIFEST,
    RESULTS,
    REWARD_MODEL,
    name_base,
)

KIND: Final = "rlhf"
ASPECT: Final = "overall"
LEAST_RATINGS: Final = 10
LEAST_PROMPTS: Final = 2
REUSED: Final = "rewardModel"
REUSED_PLACE: Final = "rewardModelPath"
"""Facts of a job: the version whose reward model it reuses, and its folder; None: it trains one."""


class FeedbackTraining:
    """The kind of job; see `penstock.gateway.jobs.job_records.JobKind`."""

    def facts(self, registry: Registry, policy: str) -> Mapping[str, Any]:
        """Return the number of ratings, the newest one, and mean and deviation of the scores; ApiError 400.

        Pairs count as ratings without scores; of pairs alone mean and deviation are None.
        """
        count, through, scores, prompts = 0, 0, list[float](), set[str]()
        for one in _used(registry, policy):
            count, through = count + 1, one.number
            if one.rating.score is not None:
                scores.append(one.rating.score)
            if len(prompts) < LEAST_PROMPTS:
                prompts.add(json.dumps(one.rating.prompt))
        if count < LEAST_RATINGS:
            told = f"{count} ratings: give at least {LEAST_RATINGS} before training"
            raise ApiError(400, told, error="insufficient")
        if len(prompts) < LEAST_PROMPTS:
            told = "all feedback is of one prompt: give some of others, by which the result is measured"
            raise ApiError(400, told, error="insufficient")
        return {
            "feedbackCount": count,
            "through": through,
            "scoreMean": fmean(scores) if scores else None,
            "scoreStd": pstdev(scores) if scores else None,
        }

    def prepare(
        self, registry: Registry, policy: str, facts: Mapping[str, Any], folder: Path
    ) -> Mapping[str, Any]:
        """Write the feedback as it was when the job was created, and copy the models that it reuses."""
        file = folder / FEEDBACK
        with open(file, "w", opener=opener) as out:
            for one in _used(registry, policy):
                if one.number <= facts["through"]:
                    out.write(f"{json.dumps(_example(one.rating))}\n")
        kwargs = {"feedback": str(file), "feedback_scale": "0:1"}
        reused = facts.get(REUSED_PLACE)
        if reused is not None:
            kwargs |= _reuse(Path(reused), folder)
        return {"environment": {"kwargs": kwargs}}

    def conclude(
        self, job: Job, outcome: Outcome, taken: Collection[str], *, folder: Path, models: Path
    ) -> Conclusion:
        """Export the models; returns their places and measures. Raises OSError, ValueError."""
        summary = outcome.summary or {}
        label = _label(job.facts["feedbackCount"], taken)
        place = models / job.project / job.agent / label
        _export(folder, place)
        evaluation = summary.get("evaluation") or {}
        made = TrainedVersion(
            version=label,
            model_path=str(place / "policy"),
            reward_model_path=str(place / REWARD_MODEL),
            feedback_count=job.facts["feedbackCount"],
            reward_mean=finite(evaluation.get("mean")),
            reward_std=finite(evaluation.get("std")),
        )
        result = {
            "version": made.version,
            "modelPath": made.model_path,
            "rewardModelPath": made.reward_model_path,
            "feedbackCount": made.feedback_count,
            "trainingSteps": summary.get("updates"),
            "rewardMean": made.reward_mean,
            "rewardStd": made.reward_std,
        }
        return Conclusion(result=result, version=made)


def _used(registry: Registry, policy: str) -> Iterator[KeptRating]:
    """Yield scores and pairs of whole responses; this training ignores other aspects."""
    return (one for one in ratings_of(registry, policy) if one.rating.key == ASPECT)


def _example(rating: Rating) -> dict[str, Any]:
    if rating.rejected is not None:
        return {"prompt": rating.prompt, "chosen": rating.response, "rejected": rating.rejected}
    return {"prompt": rating.prompt, "response": rating.response, "score": rating.score}


def _label(count: int, taken: Collection[str]) -> str:
    labels = itertools.chain([f"v{count}"], (f"v{count}.{number}" for number in itertools.count(2)))
    return next(label for label in labels if label not in taken)


def _reuse(reward_model: Path, folder: Path) -> dict[str, str]:
    """Copy a version's reward model, and its base model, into a job's folder; return their settings."""
    own, base = folder.absolute() / REWARD_MODEL, folder.absolute() / BASE_MODEL
    its_base = reward_model.absolute().parent / BASE_MODEL
    for left in (own, base):
        shutil.rmtree(left, ignore_errors=True)
    shutil.copytree(reward_model, own)
    kwargs = {"reward": str(own)}
    if its_base.is_dir():
        shutil.copytree(its_base, base)
        for name in (BESIDE, str(its_base)):  # older versions name an absolute path
            name_base(own, name, str(base))
        kwargs["model"] = str(base)
    return kwargs


def _export(folder: Path, place: Path) -> None:
    """Copy a job's models; the folder appears complete and synced to disk, or not at all.

    An incomplete one of a killed gateway is replaced. Models that the run reused lie in the job's folder.
    Raises OSError, ValueError.
    """
    run = folder / "run"
    manifest = json.loads(read_whole(run / MANIFEST))
    policy = manifest["policy"]
    if policy is None:
        raise ValueError("the run has no final policy")
    if not isinstance(policy, str) or Path(policy).is_absolute() or ".." in Path(policy).parts:
        raise ValueError(f"{MANIFEST}: policy={policy!r}: is no folder of the run")
    temporary = place.with_name(f".{place.name}")
    for left in (temporary, place):
        shutil.rmtree(left, ignore_errors=True)
    try:
        _copy(folder, manifest, temporary)
        _sync(temporary)
        temporary.rename(place)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)  # on a full disk it would take the space of the next one
        raise
    sync_folder(place.parent)


def _copy(folder: Path, manifest: dict[str, Any], temporary: Path) -> None:
    """Copy a job's models to a folder; raises OSError."""
    run = folder / "run"
    temporary.mkdir(parents=True)
    _copy_folder(run / manifest["policy"], temporary / "policy")
    made = [run / name if (run / name).is_dir() else folder / name for name in (REWARD_MODEL, BASE_MODEL)]
    reward, base = made
    _copy_folder(reward, temporary / REWARD_MODEL)
    _copy_file(run / RESULTS, temporary / RESULTS)
    if base.is_dir():
        _copy_folder(base, temporary / BASE_MODEL)
        for model in ("policy", REWARD_MODEL, BASE_MODEL):
            name_base(temporary / model, manifest["made_from"]["model"], BESIDE)


def _copy_folder(source: Path, target: Path) -> None:
    """Copy a folder of a job without checkpoints; raises OSError, also for a link in it."""

    def left_out(folder: str, names: list[str]) -> set[str]:
        for name in names:
            if (file := Path(folder) / name).is_symlink():
                raise NoPlainFile(errno.ELOOP, file, "is a link, which no version has")
        return {"checkpoints"} & set(names)

    shutil.copytree(source, target, symlinks=True, ignore=left_out, copy_function=_copy_file)


def _copy_file(source: str | Path, target: str | Path) -> None:
    with open_regular(Path(source)) as read, Path(target).open("xb") as written:
        shutil.copyfileobj(read, written)
        os.fchmod(written.fileno(), os.fstat(read.fileno()).st_mode & 0o777)


def _sync(folder: Path) -> None:
    """Sync a folder and its files to disk; raises OSError."""
    for one in (*folder.rglob("*"), folder):
        opened = os.open(one, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


# ---- Answers about trainings and policies for the OpenAPI document; the names are the service's contract.


class TrainedPolicy(Answer):
    """A finished training. trainingSteps: number of updates.

    rewardMean, rewardStd: of responses to held-out prompts, by the reward model, on whose scale a rating of 0
    is −1 and a rating of 1 is 1, and which goes beyond both; null: there were none.
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


class ModelConfig(Answer):
    """What would be trained. base_model: its folder, or of what the training makes it, as `words`."""

    base_model: str
    use_lora: bool
    learning_rate: float
    max_steps: int


class TrainingEstimate(Answer):
    """The estimate of a training, and its feedback. scoreMean, scoreStd: null where all feedback is pairs."""

    status: Literal["dry_run"]
    feedbackCount: int  # noqa: N815
    estimatedSteps: int  # noqa: N815
    estimatedTimeMinutes: float  # noqa: N815
    scoreMean: float | None  # noqa: N815
    scoreStd: float | None  # noqa: N815
    modelConfig: ModelConfig  # noqa: N815


class TrainingGoesOn(Answer):
    """A training that has not ended. job: the address of its state."""

    status: JobState
    policyId: str  # noqa: N815
    job: str


class PolicyMetrics(Answer):
    """The reward model's scores of a policy's responses to held-out prompts.

    A rating of 0 is −1 on its scale and a rating of 1 is 1; scores go beyond both.
    """

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
    """The options of a training.

    maxSteps: most updates of the policy. learningRate: of the policy. preset: name of a template of the
    gateway, which has the defaults of both. rewardModel: label of a version of the same agent whose reward
    model is reused; without it, one is trained from the feedback.
    """

    model_config = example(maxSteps=1000, learningRate=1e-5)

    dryRun: bool = False  # noqa: N815 - as callers of the service know it
    maxSteps: int | None = None  # noqa: N815
    learningRate: float | None = None  # noqa: N815
    preset: Line = KIND
    rewardModel: Line | None = None  # noqa: N815

    @field_validator("maxSteps", "learningRate", mode="before")
    @classmethod
    def _is_no_truth(cls, value: Any) -> Any:
        # The service accepts a text of digits; true would be a training of one step.
        if isinstance(value, bool):
            raise PydanticCustomError("no_number", "must be a number, neither true nor false")
        return value

    def numbers(self) -> dict[str, float]:
        return self.model_dump(include={"maxSteps", "learningRate"}, exclude_none=True)


@router.post(
    "/api/policies/train_policy/{agent_id}",
    response_model=None,
    responses={
        200: {"model": TrainedPolicy | TrainingEstimate},
        202: {"model": TrainingGoesOn, "description": "It continues: `Location` has the job's address."},
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
    """Train a policy from an agent's feedback and answer when it is trained, or estimate a training.

    A repeated request with the same `Idempotency-Key` is about the same training.
    """
    reused = await run_in_threadpool(_reused, request, member, agent_id, body.rewardModel)
    if body.dryRun:
        return await _dry_run(request, member, agent_id, body, reused)
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
            more_facts=reused,
        )
    return _answer(await ended(request, job, _wait_s(prefer)))


@router.get("/api/policies/{agent_id}", response_model=list[Policy])
def policies(request: Request, member: Member, agent_id: AgentId) -> list[dict[str, Any]]:
    """Return the trained versions of an agent, newest first."""
    found = parts_of(request).accounts.look(
        lambda session: job_queue.read_versions(session, member.project, agent_id)
    )
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
        for one in found
    ]


def service() -> Service:
    access = table(
        editor=["POST /api/policies/train_policy/{agent_id}"], viewer=["GET /api/policies/{agent_id}"]
    )
    return Service(router=router, access=access, kinds={KIND: FeedbackTraining()})


def _reused(request: Request, member: Membership, agent: str, label: str | None) -> dict[str, str | None]:
    """Return the facts about a reused reward model; raises ApiError."""
    if label is None:
        return {REUSED: None, REUSED_PLACE: None}
    found = parts_of(request).accounts.look(
        lambda session: job_queue.find_version(session, member.project, agent, label)
    )
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
            more_facts=asked,
        )
    return {
        "status": "dry_run",
        "feedbackCount": found.facts["feedbackCount"],
        "estimatedSteps": found.numbers["maxSteps"],
        "estimatedTimeMinutes": round(found.dry_run["seconds"] / 60, 2),
        "scoreMean": found.facts["scoreMean"],
        "scoreStd": found.facts["scoreStd"],
        "modelConfig": _model_config(found.recipe, found.numbers),
    }


def _model_config(recipe: Mapping[str, Any], numbers: Mapping[str, float]) -> dict[str, Any]:
    kwargs, policy = (recipe.get(one, {}).get("kwargs", {}) for one in ("environment", "policy"))
    default = TokenPPOSection.model_fields["learning_rate"].default
    return {
        "base_model": kwargs.get("model") or policy.get("model") or kwargs.get("task", ""),
        "use_lora": policy.get("lora", True),
        "learning_rate": numbers.get("learningRate", recipe["algorithm"].get("learning_rate", default)),
        "max_steps": numbers["maxSteps"],
    }


@contextmanager
def _named_preset() -> Iterator[None]:
    """Rename the field `template` of an error to `preset`, its name in these routes."""
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
