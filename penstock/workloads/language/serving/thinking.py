"""What a model thinks before it answers: how thoughts stand in a row, and how one is drawn.

    with a thought      prompt  opens  thought … end  closes  answer
    without one         prompt  directly                      answer

A thought is drawn by the version that answers, and is a request of its own to the engine: what it may take is
its budget alone, and stops, biases and penalties of the request are for the answer. It is hidden: its text
leaves only where it was asked for and the guard lets it pass.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import Final

from penstock.workloads.language.engine.engine_choice import TextEngine
from penstock.workloads.language.engine.requests import Growing, Request
from penstock.workloads.language.serving.asks import Ask
from penstock.workloads.language.tokenizer import Tokenizer

_OTHER_SEED: Final = 1 << 63
"""A thought is drawn from another sequence than the answer behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingForm:
    """How a model thinks.

    opens: ids between the prompt and a thought. end: the token that ends a thought. closes: ids between that
    and the answer. directly: ids between the prompt and an answer without a thought. most: tokens of a
    thought, its end among them. answer_tokens: of every answer; None: answers end themselves.
    """

    opens: tuple[int, ...]
    end: int
    closes: tuple[int, ...]
    directly: tuple[int, ...]
    most: int
    answer_tokens: int | None = None

    @property
    def room(self) -> int:
        """Most tokens between the prompt and the answer."""
        # A thought that its budget ends is closed as well.
        return max(len(self.opens) + self.most + 1 + len(self.closes), len(self.directly))

    def before(self, thought: "Thought | None") -> tuple[int, ...]:
        """Return what stands between the prompt and the answer."""
        if thought is None:
            return self.directly
        end = (self.end,) if thought.is_cut else ()
        return (*self.opens, *thought.ids, *end, *self.closes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Thought:
    """What was thought. ids: as sampled. is_cut: its budget ended it. milliseconds: that it took."""

    ids: tuple[int, ...]
    is_cut: bool
    milliseconds: float


class ThoughtFailed(Exception):
    """The version could not go on. cause: its error; None where the server ended first."""

    def __init__(self, cause: Exception | None) -> None:
        super().__init__(str(cause))
        self.cause = cause


@dataclass(frozen=True, slots=True)
class Thinking:
    """A thought that grows. changed: set after each of its tokens and at its end."""

    growing: Growing
    changed: asyncio.Event
    began_s: float

    async def whole(self) -> Thought:
        """Return it when it is whole; raises ThoughtFailed."""
        growing = self.growing
        while not growing.finish:
            await self.changed.wait()
            self.changed.clear()
        if growing.finish in ("failed", "cancelled"):
            raise ThoughtFailed(growing.error)
        return Thought(
            ids=tuple(growing.ids),
            is_cut=growing.finish == "length",
            milliseconds=1000.0 * (time.monotonic() - self.began_s),
        )


class Thinker:
    """Draws thoughts; one event loop uses it."""

    def __init__(self, engine: TextEngine, form: ThinkingForm, tokenizer: Tokenizer) -> None:
        self.form = form
        self._engine, self._tokenizer = engine, tokenizer
        self._loop = asyncio.get_running_loop()

    def text(self, thought: Thought) -> str:
        """Return the words of a thought, without its end."""
        ids = thought.ids if thought.is_cut else thought.ids[:-1]
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def begin(self, version: int, prompt: tuple[int, ...], budget: int, ask: Ask, index: int) -> "Thinking":
        """Have a thought of at most `budget` tokens, at least 1, drawn before answer `index` to a prompt."""
        began_s, changed = time.monotonic(), asyncio.Event()

        def tell(_: Growing) -> None:
            self._loop.call_soon_threadsafe(changed.set)

        request = Request(
            ids=(*prompt, *self.form.opens),
            most=budget,
            version=version,
            temperature=ask.temperature or 1.0,
            top_p=ask.top_p,
            seed=None if ask.seed is None else (ask.seed + index) % 2**64 ^ _OTHER_SEED,
            deterministic=ask.temperature == 0.0,
            end=self.form.end,
        )
        return Thinking(self._engine.submit(request, tell), changed, began_s)
