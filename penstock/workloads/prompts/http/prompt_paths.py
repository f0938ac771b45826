"""Paths of several mutations from a prompt: the best one, and one that is drawn."""

import asyncio
from collections.abc import Sequence
from functools import partial

import numpy as np

from penstock.client import Action
from penstock.gateway.surface import ApiError
from penstock.protocol.tensor import Array
from penstock.workloads.prompts.categories import classify
from penstock.workloads.prompts.http import api_bodies as bodies
from penstock.workloads.prompts.http.chains import Step
from penstock.workloads.prompts.http.prompt_work import PromptWork, numbers
from penstock.workloads.prompts.http.prompts_api import PromptsApi
from penstock.workloads.prompts.mutations import MUTATION_TYPES, mutate
from penstock.workloads.prompts.optimise import Optimised, optimise


async def best_path(
    api: PromptsApi, work: PromptWork, caller: str, start: str, steps: int
) -> bodies.OptimizeAnswer:
    """Return the best text on the way of the likeliest mutations; raises ApiError."""
    reward = work.parts.reward
    if reward is None:
        raise ApiError(
            409,
            "explore: people's ratings are the reward, and nothing else says which text is best: say true",
            field="explore",
        )
    loop, asked = asyncio.get_running_loop(), list[Action]()

    def choose(embedding: Sequence[float], mask: Sequence[bool]) -> int:
        state = np.asarray(embedding, np.float32)
        call = api.act(state, deterministic=True, distribution=True, mask=np.asarray(mask, np.bool_))
        asked.append(asyncio.run_coroutine_threadsafe(call, loop).result())
        return int(asked[-1].action)

    def follow() -> Optimised:
        return optimise(start, steps=steps, choose=choose, embedder=work.parts.embedder, reward=reward)

    found = await work.do_beside(follow)
    shown = api.shown.keep(caller, start, found.prompt, asked[-1].version)
    return bodies.OptimizeAnswer(
        id=shown.id,
        prompt=found.prompt,
        category=classify(start),
        reward=found.reward,
        path=[
            bodies.PathStep(
                action=one.action,
                mutation_type=one.mutation_type,
                prompt=one.prompt,
                reward=one.reward,
                probabilities=numbers(answer.distribution["probability"]),
            )
            for one, answer in zip(found.path, asked, strict=False)
        ],
        version=asked[-1].version,
    )


async def drawn_path(
    api: PromptsApi, work: PromptWork, caller: str, start: str, steps: int
) -> bodies.OptimizeAnswer:
    """Return a path whose mutations are drawn, as they are while learning; raises ApiError."""
    text, state = start, await _state(work, start)
    path, taken = list[bodies.PathStep](), list[Step]()
    for number in range(steps):
        answer = await api.act(state, distribution=True)
        before, text = text, mutate(text, answer.action)
        earned = await work.do(text, partial(work.earned, start, before, text))
        following = await _state(work, text)
        path.append(
            bodies.PathStep(
                action=answer.action,
                mutation_type=MUTATION_TYPES[answer.action],
                prompt=text,
                reward=earned,
                probabilities=numbers(answer.distribution["probability"]),
            )
        )
        taken.append(
            Step(
                state=state,
                action=answer.action,
                reward=0.0,
                next_state=following,
                done=number == steps - 1,
                log_prob=answer.log_prob,
                version=answer.version,
            )
        )
        state = following
    version = taken[-1].version
    shown = api.shown.keep(caller, start, text, version, tuple(taken))
    rewards = [one.reward for one in path if one.reward is not None]
    return bodies.OptimizeAnswer(
        id=shown.id,
        prompt=text,
        category=classify(start),
        reward=sum(rewards) if rewards else None,
        path=path,
        version=version,
    )


async def _state(work: PromptWork, text: str) -> Array:
    return await work.do(text, lambda: work.row(text))
