"""Work on the text of a prompt: its numbers, what mutations make of it, and paths of several.

What is quick is done where it is asked for; long texts, models and sources of rewards are asked in a thread.
"""

import asyncio
import base64
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import numpy as np

from penstock.gateway.surface import ApiError
from penstock.workloads.language.reward.reward_source import RewardError
from penstock.workloads.prompts.categories import classify
from penstock.workloads.prompts.checked_reward import CheckedReward, NeedsPerson
from penstock.workloads.prompts.embeddings import EmbeddingError, HashingEmbedder, Rows
from penstock.workloads.prompts.http import api_bodies as bodies
from penstock.workloads.prompts.mutations import MUTATION_TYPES, mutate, offered
from penstock.workloads.prompts.prompt_reward import QualityReward
from penstock.workloads.prompts.prompt_text import PromptError, read_prompt
from penstock.workloads.prompts.task_parts import TaskParts

T = TypeVar("T")

MOST_WAITING: Final = 64
"""Texts that may be worked on, or wait for it, at the same time."""
_THREADS: Final = 8
_LONG: Final = 2000
"""Characters above which a text is worked on beside the event loop."""


class PromptWork:
    """Work with the parts of a task; used by one event loop.

    It has threads of its own, so that a source that is slow holds up nothing else.
    """

    def __init__(self, parts: TaskParts) -> None:
        self.parts = parts
        self._waiting, self._threads = 0, ThreadPoolExecutor(_THREADS, "prompts")
        self._is_quick = isinstance(parts.embedder, HashingEmbedder) and isinstance(
            parts.reward, QualityReward | None
        )

    @property
    def rewarded_by(self) -> bodies.RewardedBy:
        """Return what gives the rewards."""
        if self.parts.reward is None:
            return "ratings"
        return "quality" if isinstance(self.parts.reward, QualityReward) else "source"

    @property
    def checked(self) -> CheckedReward | None:
        """Return the reward that people check; None where they check none."""
        return self.parts.reward if isinstance(self.parts.reward, CheckedReward) else None

    def close(self) -> None:
        """Let go of the parts; work that goes on is not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.parts.close()

    async def do(self, text: str, work: Callable[[], T]) -> T:
        """Return the result of work on a text; raises ApiError for what a source does not give."""
        if self._is_quick and len(text) <= _LONG:
            return work()
        return await self.do_beside(work)

    async def do_beside(self, work: Callable[[], T]) -> T:
        """Return the result of work, done in a thread; raises ApiError for what a source does not give."""
        if self._waiting >= MOST_WAITING:
            raise ApiError(503, f"{self._waiting} texts are being worked on: try again", retry_s=1)
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except NeedsPerson as error:
            raise ApiError(409, str(error)) from error
        except (EmbeddingError, RewardError) as error:
            raise ApiError(502, str(error), error="bad_gateway") from error
        finally:
            self._waiting -= 1

    def row(self, prompt: str) -> Rows:
        """Return the embedding of a prompt, float32 [1536]."""
        found: Rows = self.parts.embedder.embed([prompt])[0]
        return found

    def embedded(self, prompt: str, encoding: str) -> bodies.EmbedAnswer:
        """Return a prompt as numbers."""
        return bodies.EmbedAnswer(
            embedding=self._encoded(prompt, encoding),
            category=classify(prompt),
            offered=list(offered(prompt)),
        )

    def earned(self, start: str, before: str, after: str) -> float | None:
        """Return what a step is worth; None where people say so later."""
        return None if self.parts.reward is None else self.parts.reward.of(start, before, after)

    def mutated(self, start: str, prompt: str, body: bodies.MutateRequest) -> bodies.MutateAnswer:
        """Return what a mutation makes of a prompt."""
        text = mutate(prompt, body.action)
        return bodies.MutateAnswer(
            prompt=text,
            action=body.action,
            mutation_type=MUTATION_TYPES[body.action],
            reward=self.earned(start, prompt, text) if body.rewarded else None,
            category=classify(start),
            changed=text != prompt,
            embedding=None if body.encoding == "none" else self._encoded(text, body.encoding),
        )

    def _encoded(self, prompt: str, encoding: str) -> list[float] | str:
        row = self.row(prompt)
        if encoding == "base64":
            return base64.b64encode(row.astype("<f4").tobytes()).decode()
        return numbers(row)


def numbers(array: Any) -> list[float]:
    """Return an array's numbers in a row."""
    return [float(number) for number in np.asarray(array).reshape(-1)]


def checked_prompt(text: str, field: str = "prompt") -> str:
    """Return a prompt in its one form; raises ApiError 422 that names the field."""
    try:
        return read_prompt(text, field)
    except PromptError as error:
        raise ApiError(422, str(error), field=field) from error
