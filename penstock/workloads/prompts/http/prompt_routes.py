"""The routes: actions for prompts, transitions, updates, checkpoints, mutations of a text, ratings."""

import asyncio
import contextlib
import inspect
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar, get_type_hints

import numpy as np
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from penstock.client import CommandRefusal
from penstock.gateway.application import Service
from penstock.gateway.frame.pages import SHARED, add_files, add_page, files_in
from penstock.gateway.frame.requests import ApiError
from penstock.gateway.frame.route_access import Handler, JsonRoute, caller_of, table
from penstock.gateway.routes.console_routes import document_of, error_answer
from penstock.gateway.upstream import Upstream, answered
from penstock.workloads.prompts.categories import classify
from penstock.workloads.prompts.checked_reward import NoSuchCheck
from penstock.workloads.prompts.embeddings import WIDTH
from penstock.workloads.prompts.features import MUTATION_TYPES
from penstock.workloads.prompts.http import api_bodies as bodies
from penstock.workloads.prompts.http.prompts_api import (
    PromptsApi,
    PromptWork,
    ShownPath,
    checked_prompt,
    numbers,
)
from penstock.workloads.prompts.http.run_learning import GivenAnswer, Step, state_key


class DirectRoute(JsonRoute):
    """A fast route for the calls of every step: a function of `body` and optionally of `request` and `api`.

    FastAPI parses a body by Python's JSON, resolves dependencies, and validates the answer. Here the body's
    model parses the bytes, and the answer, a valid model, is serialised directly. Errors and the OpenAPI
    document are the same.
    """

    def inner_handler(self) -> Handler:
        """Return a handler that calls the function directly."""
        function: Any = self.endpoint
        wanted = set(inspect.signature(function).parameters)
        assert {"body"} <= wanted <= {"request", "api", "body"}, function
        model: type[BaseModel] = get_type_hints(function)["body"]

        async def direct(request: Request) -> Response:
            try:
                body = model.model_validate_json(await request.body())
            except ValidationError as error:
                raise RequestValidationError(_of_body(error)) from error
            except ClientDisconnect as error:
                raise ApiError(400, "the body broke off") from error
            given = {"request": request, "api": request.app.state.api, "body": body}
            answer: BaseModel = await function(**{name: given[name] for name in wanted})
            return Response(answer.model_dump_json(), media_type="application/json")

        return direct


def _of_body(error: ValidationError) -> list[dict[str, Any]]:
    """Return the errors in FastAPI's form, without the sent values."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    return [{**one, "loc": ("body", *one["loc"])} for one in found]


# ---- Paths of several mutations from a prompt.


async def mutation_path(
    api: PromptsApi, work: PromptWork, caller: str, start: str, *, steps: int, explore: bool
) -> bodies.OptimizeAnswer:
    """Return the best text on the path of the likeliest mutations; raises ApiError.

    steps: most mutations; the path ends at one that changes nothing. explore: mutations are drawn, and the
    path has all of them.
    """
    if work.parts.reward is None and not explore:
        raise ApiError(
            409,
            "explore: people's ratings are the reward, so no text is known to be the best: send true",
            field="explore",
        )
    path, transitions, version = await _walk(api, work, start, steps=steps, explore=explore)
    path = path if explore else best_part(path)
    shown = ShownPath(
        caller=caller,
        start=start,
        prompt=path[-1].prompt if path else start,
        version=version,
        steps=tuple(transitions) if explore else (),
    )
    return bodies.OptimizeAnswer(
        id=api.shown.keep(shown),
        prompt=shown.prompt,
        category=classify(start),
        reward=None if work.parts.reward is None else sum(one.reward or 0.0 for one in path),
        path=path,
        version=version,
    )


async def _walk(
    api: PromptsApi, work: PromptWork, start: str, *, steps: int, explore: bool
) -> tuple[list[bodies.PathStep], list[Step], int]:
    """Return the steps of a path, their transitions, and the version that chose the last one."""
    text, state = start, await work.do(start, partial(work.row, start))
    path, transitions = list[bodies.PathStep](), list[Step]()
    for number in range(steps):
        mask = None if explore else await work.do(text, partial(work.mask, text))
        answer = await api.act(state, deterministic=not explore, distribution=True, mask=mask)
        is_last = number == steps - 1
        # The state after the last step is in its transition alone, which only a drawn path has.
        step = partial(work.step, start, text, answer.action, embedded=explore or not is_last)
        before, (text, earned, following) = text, await work.do(text, step)
        if text == before and not explore:
            break
        path.append(
            bodies.PathStep(
                action=answer.action,
                mutation_type=MUTATION_TYPES[answer.action],
                prompt=text,
                reward=earned,
                probabilities=numbers(answer.distribution["probability"]),
            )
        )
        if following is None:
            break
        transitions.append(
            Step(
                state=state,
                action=answer.action,
                reward=0.0,
                next_state=following,
                done=is_last,
                log_prob=answer.log_prob,
                version=answer.version,
            )
        )
        state = following
    return path, transitions, answer.version


def best_part(path: Sequence[bodies.PathStep]) -> list[bodies.PathStep]:
    """Return the steps to the text with the largest sum of rewards; no step where no sum is above 0."""
    sums = [0.0, *accumulate(one.reward or 0.0 for one in path)]
    return list(path[: sums.index(max(sums))])


F = TypeVar("F", bound=Callable[..., Any])

_ERRORS: Final = {
    400: "The body cannot be read.",
    401: "No token of the project, where the API is reached from other machines.",
    403: "A page of another origin, or a token whose role does not suffice.",
    404: "There is no such checkpoint.",
    408: "The body came too slowly.",
    409: "The run refuses it; `detail` has the cause.",
    413: "The body is too large.",
    415: "The content type is not JSON.",
    421: "The request names another host.",
    422: "A field is wrong.",
    429: "Too many requests, or too many steps wait for an update; `Retry-After` has the delay.",
    502: "The run does not accept the gateway, or a source of scores or embeddings fails.",
    503: "The run is not ready; `Retry-After` has the delay.",
    504: "The run did not answer in time; the command continues.",
}
router = APIRouter(
    route_class=JsonRoute,
    tags=["prompts"],
    responses={status: error_answer(text) for status, text in _ERRORS.items()},
)


async def api_of(request: Request) -> PromptsApi:
    found: PromptsApi = request.app.state.api
    return found


Api = Annotated[PromptsApi, Depends(api_of)]


def _at_each_step(path: str) -> Callable[[F], F]:
    def add(function: F) -> F:
        router.add_api_route(path, function, methods=["POST"], route_class_override=DirectRoute)
        return function

    return add


@router.get("/health")
async def health(api: Api) -> bodies.HealthAnswer:
    """Check that the API gives actions."""
    await api.act(np.zeros(WIDTH, np.float32))
    return bodies.HealthAnswer(status="ok")


@router.get("/stats")
async def stats(api: Api) -> bodies.StatsAnswer | bodies.NoStatsAnswer:
    """Return metrics of the run."""
    learning = api.learning
    if api.knows_its_broker:
        await answered(learning.look(await api.control()))
    learner = learning.status.learner if learning.status else {}
    updates, episodes = int(learner.get("updates") or 0), int(learner.get("episodes") or 0)
    if not updates and not api.episodes:
        return bodies.NoStatsAnswer(message="No training data yet")
    returns = api.returns
    return bodies.StatsAnswer(
        total_updates=updates,
        total_episodes=max(episodes, api.episodes),
        avg_reward=sum(returns) / len(returns) if returns else None,
        max_reward=max(returns, default=None),
        avg_policy_loss=learning.mean("policy_loss"),
        avg_value_loss=learning.mean("value_loss"),
        avg_entropy=learning.mean("entropy"),
        avg_kl=learning.mean("kl_behaviour"),
        buffer_size=learning.waiting_steps,
        open_chains=len(api.chains),
        unverified=api.unverified,
        lost=api.chains.lost,
    )


@_at_each_step("/select_action")
async def select_action(request: Request, api: Api, body: bodies.SelectRequest) -> bodies.SelectAnswer:
    """Choose a mutation for a prompt."""
    answer = await api.act(body.embedding, deterministic=body.deterministic)
    assert answer.log_prob is not None
    assert answer.value is not None
    given = GivenAnswer(
        state=state_key(body.embedding),
        action=answer.action,
        log_prob=None if body.deterministic else answer.log_prob,
        version=answer.version,
    )
    api.given.give(caller_of(request), given)
    return bodies.SelectAnswer(
        action=answer.action,
        mutation_type=MUTATION_TYPES[answer.action],
        log_prob=answer.log_prob,
        value=answer.value,
        version=answer.version,
        ticket=given.ticket,
    )


@_at_each_step("/store_experience")
async def store_experience(request: Request, api: Api, body: bodies.StoreRequest) -> bodies.StoreAnswer:
    """Store a transition for training."""
    verified, duplicate = await api.store(caller_of(request), body)
    return bodies.StoreAnswer(
        stored=True, buffer_size=api.learning.waiting_steps, verified=verified, duplicate=duplicate
    )


@router.post("/update")
async def update(api: Api) -> bodies.UpdateAnswer | bodies.TooFewAnswer:
    """Train on the stored steps, and answer once the new version is served."""
    learning = api.learning
    report = await answered(learning.flush(await api.control(), api.chains.end_all))
    if report.refusal is CommandRefusal.TOO_FEW_STEPS:
        return bodies.TooFewAnswer(message="Not enough experiences", buffer_size=learning.waiting_steps)
    assert learning.status is not None
    version = await api.await_version(learning.status.update)
    return bodies.UpdateAnswer(
        policy_loss=learning.last("policy_loss"),
        value_loss=learning.last("value_loss"),
        entropy=learning.last("entropy"),
        approx_kl=learning.last("kl_behaviour"),
        clip_fraction=learning.last("clip_fraction"),
        learning_rate=learning.last("learning_rate"),
        buffer_size=learning.waiting_steps,
        update_count=int(learning.status.learner.get("updates") or 0),
        version=version,
        steps=report.steps,
    )


@_at_each_step("/get_distribution")
async def get_distribution(api: Api, body: bodies.DistributionRequest) -> bodies.DistributionAnswer:
    """Return the probability of each mutation for a prompt."""
    answer = await api.act(body.embedding, deterministic=True, distribution=True)
    return bodies.DistributionAnswer(
        probabilities=numbers(answer.distribution["probability"]),
        mutation_types=list(MUTATION_TYPES),
        version=answer.version,
    )


@router.post("/save")
async def save(api: Api, body: bodies.SaveRequest) -> bodies.SaveAnswer:
    """Save a checkpoint of the run under a name."""
    name = body.path or f"save-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"
    await answered(api.learning.save(await api.control(), name))
    return bodies.SaveAnswer(saved=True, path=name)


@router.post("/load")
async def load(api: Api, body: bodies.LoadRequest) -> bodies.LoadAnswer:
    """Return to a named checkpoint; counters are not reset."""
    version, given_up = await answered(api.learning.load(await api.control(), body.path))
    return bodies.LoadAnswer(loaded=True, version=version, given_up=given_up)


@_at_each_step("/embed")
async def embed(api: Api, body: bodies.EmbedRequest) -> bodies.EmbedAnswer:
    """Return the embedding of a prompt."""
    prompt, work = checked_prompt(body.prompt), await api.work()
    return await work.do(prompt, lambda: work.embedded(prompt, body.encoding))


@_at_each_step("/mutate")
async def mutated(api: Api, body: bodies.MutateRequest) -> bodies.MutateAnswer:
    """Return a mutation of a prompt."""
    prompt, work = checked_prompt(body.prompt), await api.work()
    start = prompt if body.start is None else checked_prompt(body.start, "start")
    return await work.do(prompt + start, lambda: work.mutated(start, prompt, body))


@router.post("/optimize")
async def optimize(request: Request, api: Api, body: bodies.OptimizeRequest) -> bodies.OptimizeAnswer:
    """Return the best prompt within so many mutations, and the path to it."""
    start, work = checked_prompt(body.prompt), await api.work()
    return await mutation_path(api, work, caller_of(request), start, steps=body.steps, explore=body.explore)


@router.post("/rate")
async def rate(request: Request, api: Api, body: bodies.RateRequest) -> bodies.RateAnswer:
    """Store a rating of a prompt of `/optimize`, once."""
    work = await api.work()
    learned = await api.rate(caller_of(request), body.id, body.score, learns=work.rewarded_by == "ratings")
    return bodies.RateAnswer(stored=True, learned=learned)


@router.get("/checks")
async def checks(api: Api) -> bodies.ChecksAnswer:
    """Return the scores that wait for a check by a person."""
    work = await api.work()
    reward = work.checked
    if reward is None:
        return bodies.ChecksAnswer(rewarded_by=work.rewarded_by, every=0, checked=0, agreed=0, waiting=[])
    checked, agreed = reward.checked()
    return bodies.ChecksAnswer(
        rewarded_by=work.rewarded_by,
        every=reward.every,
        checked=checked,
        agreed=agreed,
        waiting=[bodies.WaitingCheck(**asdict(one)) for one in reward.waiting()],
    )


@router.post("/checks")
async def check(request: Request, api: Api, body: bodies.CheckRequest) -> bodies.CheckAnswer:
    """Store which of two texts a person prefers, once."""
    reward = (await api.work()).checked
    if reward is None:
        raise ApiError(
            409, "the rewards of this run are not checked by people: set environment.kwargs.human_check_every"
        )
    try:
        await api.keep_check(caller_of(request), reward.find(body.id), body.better)
        reward.answer(body.id, body.better)
    except NoSuchCheck as error:
        raise ApiError(404, str(error), field="id") from error
    checked, agreed = reward.checked()
    return bodies.CheckAnswer(stored=True, checked=checked, agreed=agreed)


# ---- The page and the site.

_FILES: Final = files_in(Path(__file__).parent / "static") | SHARED
add_page(router, "/prompts", _FILES["index.html"], include_in_schema=False)
add_files(router, "/prompts", _FILES, include_in_schema=False)


@contextlib.asynccontextmanager
async def life(upstream: Upstream, app: FastAPI) -> AsyncIterator[None]:
    """Hold the state of the API while the application serves."""
    api = app.state.api = PromptsApi(upstream)
    working = asyncio.create_task(api.keep_house(), name="prompts")
    yield
    working.cancel()
    await asyncio.wait([working])
    await api.close()


@router.get("/openapi.json", include_in_schema=False)
async def openapi(request: Request) -> dict[str, Any]:
    app: FastAPI = request.app
    if app.openapi_schema is None:
        app.openapi_schema = document_of(app)
    return app.openapi_schema


def site() -> Service:
    return Service(
        title="Penstock prompts",
        router=router,
        access=table(
            anybody=["GET /health", "GET /openapi.json", "GET /prompts", "GET /prompts/{file}"],
            viewer=[
                "GET /stats",
                "POST /select_action",
                "POST /get_distribution",
                "POST /embed",
                "POST /mutate",
                "POST /optimize",
            ],
            editor=[
                "POST /store_experience",
                "POST /update",
                "POST /save",
                "POST /load",
                "POST /rate",
                "GET /checks",
                "POST /checks",
            ],
        ),
        recipe=Path(__file__).resolve().parents[3] / "recipes" / "prompts.toml",
        life=life,
        page="/prompts",
    )
