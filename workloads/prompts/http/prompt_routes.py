"""The routes: actions for prompts, transitions, updates, checkpoints, and what mutations make of a text."""

import asyncio
import base64
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, TypeVar

import numpy as np
from fastapi import APIRouter, Depends, Request
from starlette.concurrency import run_in_threadpool

from gateway.surface import ApiError, caller_of
from penstock.client import Action, CommandRefusal
from workloads.prompts.categories import classify
from workloads.prompts.embeddings import HashingEmbedder
from workloads.prompts.http import api_bodies as bodies
from workloads.prompts.http.given_answers import state_key
from workloads.prompts.http.json_routes import DirectRoute, JsonRoute
from workloads.prompts.http.prompts_api import PromptsApi, answered
from workloads.prompts.mutations import MUTATION_TYPES, mutate, offered
from workloads.prompts.optimise import optimise
from workloads.prompts.prompt_reward import QualityReward
from workloads.prompts.prompt_text import PromptError, read_prompt

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_LONG: Final = 2000
"""Characters above which a text is worked on beside the event loop."""
_EMBEDDER: Final = HashingEmbedder()
_REWARD: Final = QualityReward()


router = APIRouter(route_class=JsonRoute, tags=["prompts"])


async def api_of(request: Request) -> PromptsApi:
    """Return what the routes work with."""
    found: PromptsApi = request.app.state.api
    return found


Api = Annotated[PromptsApi, Depends(api_of)]


def _at_each_step(path: str) -> Callable[[F], F]:
    """Return a decorator that adds a route which programs call at every step."""

    def add(function: F) -> F:
        router.add_api_route(path, function, methods=["POST"], route_class_override=DirectRoute)
        return function

    return add


@router.get("/health")
async def health(api: Api) -> bodies.HealthAnswer:
    """Tell that an action would be given."""
    await api.act(np.zeros(bodies.SIZE, np.float32))
    return bodies.HealthAnswer(status="ok")


@router.get("/stats")
async def stats(api: Api) -> bodies.StatsAnswer | bodies.NoStatsAnswer:
    """Return figures of the run."""
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
    state = body.embedding
    answer = await api.act(state, deterministic=body.deterministic)
    assert answer.log_prob is not None
    assert answer.value is not None
    given = api.given.give(
        caller_of(request),
        state_key(state),
        answer.action,
        None if body.deterministic else answer.log_prob,
        answer.version,
    )
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
    """Take in a transition, to be learned from."""
    verified, duplicate = await api.store(caller_of(request), body, body.state, body.next_state)
    return bodies.StoreAnswer(
        stored=True, buffer_size=api.learning.waiting_steps, verified=verified, duplicate=duplicate
    )


@router.post("/update")
async def update(api: Api) -> bodies.UpdateAnswer | bodies.TooFewAnswer:
    """Learn from what is there, and answer once the new version does."""
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
    """Return how likely each mutation is for a prompt."""
    answer = await api.act(body.embedding, deterministic=True, distribution=True)
    return bodies.DistributionAnswer(
        probabilities=_numbers(answer.distribution["probability"]),
        mutation_types=list(MUTATION_TYPES),
        version=answer.version,
    )


@router.post("/save")
async def save(api: Api, body: bodies.SaveRequest) -> bodies.SaveAnswer:
    """Keep a checkpoint of the run under a name."""
    name = body.path or f"save-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"
    await answered(api.learning.save(await api.control(), name))
    return bodies.SaveAnswer(saved=True, path=name)


@router.post("/load")
async def load(api: Api, body: bodies.LoadRequest) -> bodies.LoadAnswer:
    """Go back to a named checkpoint; what counts goes on."""
    version = await answered(api.learning.load(await api.control(), body.path))
    return bodies.LoadAnswer(loaded=True, version=version)


@_at_each_step("/embed")
async def embed(body: bodies.EmbedRequest) -> bodies.EmbedAnswer:
    """Return a prompt as numbers."""
    prompt = _prompt(body.prompt)
    return await _beside(prompt, lambda: _embedded(prompt, body.encoding))


@_at_each_step("/mutate")
async def mutated(body: bodies.MutateRequest) -> bodies.MutateAnswer:
    """Return what a mutation makes of a prompt."""
    prompt = _prompt(body.prompt)
    start = prompt if body.start is None else _prompt(body.start, "start")
    return await _beside(prompt + start, lambda: _mutated(start, prompt, body))


@router.post("/optimize")
async def optimize(api: Api, body: bodies.OptimizeRequest) -> bodies.OptimizeAnswer:
    """Return the best prompt within so many mutations, and the path to it."""
    start, loop = _prompt(body.prompt), asyncio.get_running_loop()
    asked = list[Action]()

    def choose(embedding: Sequence[float], mask: Sequence[bool]) -> int:
        state = np.asarray(embedding, np.float32)
        call = api.act(state, deterministic=True, distribution=True, mask=np.asarray(mask, np.bool_))
        asked.append(asyncio.run_coroutine_threadsafe(call, loop).result())
        return int(asked[-1].action)

    found = await run_in_threadpool(
        optimise, start, steps=body.steps, choose=choose, embedder=_EMBEDDER, reward=_REWARD
    )
    return bodies.OptimizeAnswer(
        prompt=found.prompt,
        category=classify(start),
        reward=found.reward,
        path=[
            bodies.PathStep(
                action=one.action,
                mutation_type=one.mutation_type,
                prompt=one.prompt,
                reward=one.reward,
                probabilities=_numbers(answer.distribution["probability"]),
            )
            for one, answer in zip(found.path, asked, strict=False)
        ],
        version=asked[-1].version,
    )


def _numbers(array: Any) -> list[float]:
    return [float(number) for number in np.asarray(array).reshape(-1)]


def _prompt(text: str, field: str = "prompt") -> str:
    try:
        return read_prompt(text, field)
    except PromptError as error:
        raise ApiError(422, str(error), field=field) from error


def _embedded(prompt: str, encoding: str) -> bodies.EmbedAnswer:
    return bodies.EmbedAnswer(
        embedding=_encoded(prompt, encoding), category=classify(prompt), offered=list(offered(prompt))
    )


def _encoded(prompt: str, encoding: str) -> list[float] | str:
    row = _EMBEDDER.embed([prompt])[0]
    if encoding == "base64":
        return base64.b64encode(row.astype("<f4").tobytes()).decode()
    return _numbers(row)


def _mutated(start: str, prompt: str, body: bodies.MutateRequest) -> bodies.MutateAnswer:
    text = mutate(prompt, body.action)
    return bodies.MutateAnswer(
        prompt=text,
        action=body.action,
        mutation_type=MUTATION_TYPES[body.action],
        reward=_REWARD.of(start, prompt, text),
        category=classify(start),
        changed=text != prompt,
        embedding=None if body.encoding == "none" else _encoded(text, body.encoding),
    )


async def _beside(text: str, work: Callable[[], T]) -> T:
    """Return the result of work on a text, done beside the event loop where the text is long."""
    return await run_in_threadpool(work) if len(text) > _LONG else work()
