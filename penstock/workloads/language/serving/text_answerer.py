"""Answers of the chosen version, or of the model without its adapter where that version fails."""

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

from penstock.config.settings import ServingSection
from penstock.policy.weights import sha256
from penstock.protocol.refusal import Reason, Refusal, Refused, invalid
from penstock.protocol.specification import Probe
from penstock.registry.routing import Arm, Arms
from penstock.runtime import metrics
from penstock.workloads.language.engine import EngineTolerance, Growing, Request, TextEngine
from penstock.workloads.language.guard import BUILT_IN, Direction, Guard, HeldText, Verdict, read_guard_files
from penstock.workloads.language.prompt import Message, ToolCall
from penstock.workloads.language.serving.text_request import TextAnswer, TextReply, TextRequest, Thought
from penstock.workloads.language.settings import GuardSection
from penstock.workloads.language.tokenizer import Tokenizer, end_ids
from penstock.workloads.plugin.serving import (
    Answered,
    Choice,
    Loaded,
    LoadedVersions,
    Weights,
    count_not_learned,
)

# ---- The guard.


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerGuard:
    """A guard for any number of conversations.

    penalty: reward of a blocked answer, at most 0; 0: a blocked answer is not learned from.
    """

    guard: Guard
    penalty: float = 0.0

    def check_messages(self, messages: Sequence[Message], arm: Arm) -> None:
        """Raise Refused (INVALID), which names the first blocked message and the rule."""
        for index, message in enumerate(messages):
            if message.role == "assistant":
                continue  # it was checked when the model wrote it, or the caller wrote it
            verdict = self.guard.check(message.content, Direction.INPUT)
            if verdict.is_blocked:
                self.count(verdict, Direction.INPUT, arm)
                raise invalid(f"messages[{index}].content: blocked by {verdict.by}; say it otherwise")

    def check_whole(self, text: str) -> Verdict:
        return self.guard.check(text, Direction.OUTPUT)

    def count(self, verdict: Verdict, direction: Direction, arm: Arm) -> None:
        metrics.TEXT_BLOCKED.labels(arm=arm, direction=direction, by=verdict.by).inc()


def open_guard(section: GuardSection, penalty: float = 0.0) -> AnswerGuard | None:
    """Return the guard of a run: the built-in rules and its files; None where it has none.

    penalty: see `AnswerGuard`. Raises ConfigurationError for a file that cannot be used.
    """
    if not (section.guard or section.guard_rules or section.guard_classifier):
        return None
    rules, classifier = read_guard_files(section)
    return AnswerGuard(guard=Guard((*BUILT_IN, *rules), classifier), penalty=penalty)


# ---- The text of an answer while its tokens come: stop texts, what may be shown already, tool calls.

OPENING: Final = "<tool_call>"
_CALL: Final = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_UNFINISHED: Final = "\ufffd"
"""What a decoder writes for a character whose bytes have not all come."""
_BYTE: Final = re.compile(r"<0x[0-9A-F]{2}>")
"""Token of one byte (byte fallback): a later byte may change the text of all bytes before it."""


class AnswerText:
    """The text of an answer, which grows token by token.

    stops: texts that end it. ends: tokens that end it, which have no text. begins_with: its beginning, which
    the request has set.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stops: Sequence[str] = (),
        ends: Sequence[int] = (),
        begins_with: str = "",
        holds_calls: bool = False,
    ) -> None:
        """holds_calls: whether text that may be a tool call is held back."""
        self._tokenizer, self._stops, self._begin = tokenizer, tuple(stops), begins_with
        self._ends = frozenset(ends)
        self._held = (*self._stops, OPENING) if holds_calls else self._stops
        self._ids: list[int] = []
        self._shown, self._settled = 0, len(begins_with)
        self.text = begins_with
        self.is_stopped = False
        self.tokens: list[str] = []
        """Text that each token added; a character is of the token with its last byte."""
        self._told = len(begins_with)

    def add(self, token: int) -> None:
        """Add a token; once a text of `stops` is complete, `text` ends before it and `is_stopped` is set."""
        if token in self._ends:
            self.tokens.append(self.text[self._told :])
            return
        self._ids.append(token)
        written = self._begin + self._tokenizer.decode(self._ids, skip_special_tokens=True)
        whole = len(written.rstrip(_UNFINISHED))
        self.tokens.append(written[self._told : whole])
        self._told = max(self._told, whole)
        if not _BYTE.fullmatch(str(self._tokenizer.convert_ids_to_tokens(token))):
            self._settled = len(written)
        found = [place for stop in self._stops if (place := written.find(stop)) >= 0]
        self.is_stopped = bool(found)
        self.text = written[: min(found)] if found else written

    def take_shown(self) -> str:
        """Return the new text that is certain: no part of a stop, of a tool call or of a character."""
        return self._take(self._certain())

    def take_rest(self, message: Message) -> str:
        """Return the new text of the final message."""
        return self._take(message.content)

    def _take(self, text: str) -> str:
        part, self._shown = text[self._shown :], max(self._shown, len(text))
        return part

    def _certain(self) -> str:
        text = self.text[: self._settled].rstrip(_UNFINISHED)
        certain = self._without_held(text)
        if OPENING not in self._held:
            return certain
        return min(certain, text.partition(OPENING)[0], key=len).rstrip()  # as it is before a call

    def _without_held(self, text: str) -> str:
        """Return the text without an end that may be the beginning of a stop or a tool call."""
        begun = (
            length
            for held in self._held
            for length in range(1, min(len(held), len(text) + 1))
            if text.endswith(held[:length])
        )
        return text[: len(text) - max(begun, default=0)]


def as_message(text: str, tools: Collection[dict[str, Any]], call_id: str) -> Message:
    """Return a text as the assistant's message. call_id: first part of the ids of its tool calls."""
    names = {tool["function"]["name"] for tool in tools}
    calls: list[ToolCall] = []

    def take(match: "re.Match[str]") -> str:
        parsed = _parsed(match[1], names)
        if parsed is None:
            return match[0]
        calls.append(ToolCall(f"{call_id}-{len(calls)}", *parsed))
        return ""

    rest = _CALL.sub(take, text) if names else text
    return Message("assistant", rest.rstrip() if calls else rest, tuple(calls))


def _parsed(text: str, names: Collection[str]) -> tuple[str, str] | None:
    """Return the name of a tool call and its arguments as JSON; None for text that is no call."""
    try:
        call = json.loads(text)
        name, arguments = call.get("name"), call.get("arguments", {})
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        written.encode()  # half a pair of surrogates has no bytes
    except (ValueError, RecursionError):
        return None
    if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
        return None
    return name, written


# ---- Thoughts before answers: their place in a row of ids.

_OTHER_SEED: Final = 1 << 63
"""Changes the seed, so that a thought and its answer are drawn from different sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingForm:
    """How a model thinks.

    opens: ids between the prompt and a thought. end: the token that ends a thought. closes: ids between that
    token and the answer. directly: ids between the prompt and an answer without a thought. most: tokens of a
    thought with its end. answer_tokens: of every answer; None: the model ends its answers.
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
        # 1 for the end token, which also follows a thought that its budget ended.
        return max(len(self.opens) + self.most + 1 + len(self.closes), len(self.directly))

    def before(self, thought: Thought | None) -> tuple[int, ...]:
        if thought is None:
            return self.directly
        end = (self.end,) if thought.is_cut else ()
        return (*self.opens, *thought.ids, *end, *self.closes)


# ---- Answers.

Show = Callable[[int, str], None]
"""Takes a new part of an answer: the index of the answer, and the text."""

RETRY_MS: Final = 500
WAITING_PER_ROW: Final = 4
"""Answers that may wait, for each answer that grows at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A request with its prompt.

    ids: of the prompt. most: tokens of an answer. call_id: first part of the ids of its tool calls.
    show: takes the parts of answers as they come; None: the caller reads whole answers.
    """

    request: TextRequest
    ids: tuple[int, ...]
    most: int
    call_id: str
    show: Show | None = None


class TextAnswerer:
    """Answers questions. Used by one event loop; the engine runs in another thread."""

    def __init__(
        self,
        engine: TextEngine,
        tokenizer: Tokenizer,
        section: ServingSection,
        max_rows: int,
        on_answered: Callable[[Answered], None],
        guard: AnswerGuard | None = None,
        form: ThinkingForm | None = None,
    ) -> None:
        """max_rows: answers that grow at once. on_answered: called with each answer, and with each failure.

        guard: checks questions and answers; None: nothing is checked. form: how the model thinks; None: it
        answers at once.
        """
        self.guard, self.form, self.engine, self.tokenizer = guard, form, engine, tokenizer
        self.ends = end_ids(tokenizer)
        self.section, self.most_waiting, self._on_answered = section, WAITING_PER_ROW * max_rows, on_answered

    @property
    def whole(self) -> int | None:
        """Tokens of every answer; None: answers end themselves."""
        return None if self.form is None else self.form.answer_tokens

    async def answer(self, choice: Choice, question: Question, until_s: float) -> TextReply:
        """Return all answers to a question; raises Refused. until_s: by the clock of the event loop."""
        if self.guard is not None:
            self.guard.check_messages(question.request.messages, choice.arm)
        loaded = None if choice.is_previous else choice.loaded
        why = "neither the version nor the model without its adapter can answer"
        if loaded is not None:
            drawing = Drawing(self, question, loaded.version, choice.arm)
            try:
                answers = await drawing.answers(until_s)
            except _Failed as error:
                self._blame(choice.arm, not_finite=isinstance(error.cause, ArithmeticError))
                if drawing.has_shown:
                    raise _not_ready(
                        "the version failed after a part of the answer was sent: ask again"
                    ) from error
            else:
                if not self._needs_another(answers):
                    self._on_answered(Answered(arm=choice.arm, action={}, answer=None, fallback=""))
                    return _reply(answers, question, choice.arm, loaded)
                count_not_learned("blocked", sum(len(one.ids) for one in answers))
                self._blame(choice.arm, not_finite=False)
                why = "the guard kept the answer back, and the model without its adapter cannot answer"
        if self.section.fallback == "none":
            raise _not_ready("no version can answer, and serving.fallback=none")
        try:
            answers = await Drawing(self, question, 0, choice.arm).answers(until_s)
        except _Failed as error:
            raise _not_ready(why) from error
        return _reply(answers, question, choice.arm, None)

    def _needs_another(self, answers: tuple[TextAnswer, ...]) -> bool:
        """Return whether the guard blocked all of a version's answers and none of them is learned from."""
        if self.guard is None or self.guard.penalty or self.section.fallback == "none":
            return False
        return all(one.is_blocked and not one.message.content for one in answers)

    def _blame(self, arm: Arm, *, not_finite: bool) -> None:
        self._on_answered(
            Answered(
                arm=arm,
                action={},
                answer=None,
                fallback="adapter_off",
                not_finite=not_finite,
                is_to_blame=True,
            )
        )


def _reply(answers: tuple[TextAnswer, ...], question: Question, arm: Arm, by: Loaded | None) -> TextReply:
    return TextReply(
        answers=answers,
        version=0 if by is None else by.version,
        update=0 if by is None else by.update,
        arm=arm,
        is_fallback=by is None,
        prompt_tokens=len(question.ids),
    )


def _not_ready(why: str) -> Refused:
    return Refused(Refusal(reason=Reason.NOT_READY, detail=why, retry_after_ms=RETRY_MS))


class _Failed(Exception):
    """A version failed. cause: its error."""

    def __init__(self, cause: Exception | None) -> None:
        super().__init__(str(cause))
        self.cause = cause


class _Row:
    """A request in the engine. The running event loop learns of each of its tokens and of its end."""

    def __init__(self, engine: TextEngine, request: Request) -> None:
        loop, self._changed = asyncio.get_running_loop(), asyncio.Event()

        def notify(_: Growing) -> None:
            loop.call_soon_threadsafe(self._changed.set)

        self.growing = engine.submit(request, notify)

    async def wait(self) -> None:
        await self._changed.wait()
        self._changed.clear()


class Drawing:
    """The answers of one version to one question."""

    def __init__(self, by: TextAnswerer, question: Question, version: int, arm: Arm) -> None:
        self._by, self._question, self._request = by, question, question.request
        self._version, self._arm = version, arm
        self._rows: list[Growing] = []
        """All requests in the engine."""
        self.has_shown = False

    async def answers(self, until_s: float) -> tuple[TextAnswer, ...]:
        """Return the answers; raises _Failed, and Refused where no room or no time is left."""
        waiting = self._by.engine.waiting
        if waiting + self._request.count > self._by.most_waiting:
            text = f"{waiting} answers wait already: ask again later, or another server"
            raise Refused(Refusal(reason=Reason.OVERLOADED, detail=text, retry_after_ms=RETRY_MS))
        rows = list[asyncio.Future[TextAnswer]]()
        try:
            for index in range(self._request.count):
                rows.append(asyncio.ensure_future(self._begin(index)))
            async with asyncio.timeout_at(until_s):
                answers = await asyncio.gather(*rows)
        except TimeoutError as error:
            text = (
                "the caller's time was over before the answer was whole; give more, or a smaller max_tokens"
            )
            self._count_stopped()
            raise Refused(Refusal(reason=Reason.DEADLINE, detail=text)) from error
        except asyncio.CancelledError:
            self._count_stopped()
            raise
        finally:
            for row in rows:
                row.cancel()
            for growing in self._rows:
                growing.cancel()
        count_not_learned("thought", sum(one.thought.tokens for one in answers if one.thought is not None))
        return tuple(answers)

    def _count_stopped(self) -> None:
        count_not_learned("stopped", sum(len(growing.ids) for growing in self._rows))

    def _begin(self, index: int) -> Coroutine[Any, Any, TextAnswer]:
        """Have the engine begin an answer, or the thought before it; return what follows it to its end."""
        form, asked = self._by.form, self._request.thought_tokens
        if form is None:
            return self._grow(self._submit(index), index)
        budget = form.most if asked is None else asked
        if not budget or self._arm in self._by.section.arms_without_thought:
            return self._grow(self._submit(index, form.directly), index, form.directly)
        ids = (*self._question.ids, *form.opens)
        request = Request(ids=ids, most=budget, end=form.end, **self._draws(index, _OTHER_SEED))
        return self._think(form, self._row(request), index, time.monotonic())

    def _submit(self, index: int, before: tuple[int, ...] = ()) -> _Row:
        """Have the engine begin an answer. before: ids between the prompt and the answer."""
        question, request = self._question, self._request
        tokenizer, begins = self._by.tokenizer, request.begins_with
        begin = tokenizer(begins, add_special_tokens=False)["input_ids"] if begins else ()
        return self._row(
            Request(
                ids=(*question.ids, *before, *begin),
                most=question.most,
                bias=request.logit_bias,
                presence_penalty=request.presence_penalty,
                frequency_penalty=request.frequency_penalty,
                **self._draws(index),
            )
        )

    def _row(self, request: Request) -> _Row:
        row = _Row(self._by.engine, request)
        self._rows.append(row.growing)
        return row

    def _draws(self, index: int, other: int = 0) -> dict[str, Any]:
        """Return how tokens of the answer `index` are drawn. other: changes the seed."""
        request = self._request
        return {
            "version": self._version,
            "temperature": request.temperature or 1.0,
            "top_p": request.top_p,
            "seed": None if request.seed is None else (request.seed + index) % 2**64 ^ other,
            "deterministic": request.temperature == 0.0,
        }

    async def _think(self, form: ThinkingForm, row: _Row, index: int, began_s: float) -> TextAnswer:
        """Return an answer behind a thought that grows; raises _Failed, and Refused where the server ends."""
        thought = await self._thought(row, began_s)
        metrics.THOUGHT_TOKENS.labels(self._arm).observe(thought.tokens)
        metrics.THOUGHT_SECONDS.labels(self._arm).observe(thought.milliseconds / 1000.0)
        before = form.before(thought)
        answer = await self._grow(self._submit(index, before), index, before)
        return replace(answer, thought=self._visible(thought, answer))

    async def _thought(self, row: _Row, began_s: float) -> Thought:
        growing = row.growing
        while not growing.finish:
            await row.wait()
        _check(growing, growing.finish)
        return Thought(
            tokens=len(growing.ids),
            ids=tuple(growing.ids),
            is_cut=growing.finish == "length",
            milliseconds=1000.0 * (time.monotonic() - began_s),
        )

    def _visible(self, thought: Thought, answer: TextAnswer) -> Thought:
        """Return the thought without its text, unless the request wants it and the guard lets it pass."""
        hidden, guard = replace(thought, ids=()), self._by.guard
        if not self._request.show_thought or answer.is_blocked:
            return hidden
        ids = thought.ids if thought.is_cut else thought.ids[:-1]
        text = str(self._by.tokenizer.decode(ids, skip_special_tokens=True))
        if guard is not None:
            verdict = guard.check_whole(text)
            if verdict.is_blocked:
                guard.count(verdict, Direction.OUTPUT, self._arm)
                return hidden
        return replace(thought, text=text)

    async def _grow(self, row: _Row, index: int, before: tuple[int, ...] = ()) -> TextAnswer:
        """Return an answer behind the ids `before`, once it is whole or blocked; raises as `_think`."""
        growing, request, guard, count = row.growing, self._request, self._by.guard, 0
        text = AnswerText(
            self._by.tokenizer,
            stops=request.stop,
            ends=self._by.ends,
            begins_with=request.begins_with,
            holds_calls=bool(request.tools),
        )
        held = None if guard is None else HeldText(guard.guard)
        message, is_blocked = None, False
        while True:
            finish = growing.finish  # read first: once it is set, all tokens are there
            while count < len(growing.ids) and not text.is_stopped:
                text.add(growing.ids[count])
                count += 1
            is_over = bool(finish) or text.is_stopped
            if is_over:
                _check(growing, finish, is_stopped=text.is_stopped)
                message = as_message(text.text, request.tools, f"{self._question.call_id}-{index}")
            part = text.take_shown() if message is None else text.take_rest(message)
            if held is not None and guard is not None:
                part = held.feed(part) + (held.finish() if is_over else "")
                verdict = guard.check_whole(text.text) if is_over and request.tools else held.verdict
                if held.verdict.is_blocked or verdict.is_blocked:
                    growing.cancel()
                    guard.count(verdict, Direction.OUTPUT, self._arm)
                    # Its caller gets the part that has left; the learner alone gets what was sampled.
                    message, is_blocked = Message("assistant", held.left), True
            if part:
                self._show(index, part)
            if message is not None:
                break
            await row.wait()
        is_whole = not text.is_stopped and count == self._by.whole
        is_cut = finish == "length" and not text.is_stopped and not is_whole
        answer = TextAnswer(
            message=message,
            ids=tuple(growing.ids[:count]),
            log_prob=tuple(growing.log_prob[:count]),
            tokens=tuple(text.tokens),
            finish="length" if is_cut else "tool_calls" if message.tool_calls else "stop",
            ended=is_whole or (finish == "eos" and not text.is_stopped),
            before=before,
        )
        return replace(answer, tokens=(), finish="content_filter", ended=False) if is_blocked else answer

    def _show(self, index: int, part: str) -> None:
        if self._question.show is not None:
            self.has_shown = True
            self._question.show(index, part)


def _check(growing: Growing, finish: str, *, is_stopped: bool = False) -> None:
    """Raise _Failed for an answer that failed, and Refused for one that the server ended."""
    if finish == "failed":
        raise _Failed(growing.error)
    if finish == "cancelled" and not is_stopped:
        raise _not_ready("the server ended before the answer did")


# ---- The versions that can answer: adapters of one base model in the engine.


class AdapterVersions(LoadedVersions):
    """See `LoadedVersions`. Adapters are loaded and dropped one at a time."""

    def __init__(
        self,
        engine: TextEngine,
        policy: Any,
        fetch: Any,
        section: ServingSection,
        tolerance: EngineTolerance | None = None,
    ) -> None:
        """policy: the engine generates with its network. fetch: see `LoadedVersions`.

        tolerance: measures the engine with the first weights; None: it answers by a plain pass itself.
        """
        super().__init__(lambda: policy, fetch, section)
        self._engine, self._policy = engine, policy
        self._changing, self._unmeasured = asyncio.Lock(), tolerance
        self._in_use = Counter[int]()

    async def load(self, weights: Weights) -> Loaded:
        """See `LoadedVersions.load`; all versions have the same policy object."""
        await asyncio.to_thread(self._engine.load, weights.version, weights.blob)
        return Loaded(self._policy, weights.version, weights.update, sha256(weights.blob))

    async def take_probed(self, weights: Weights, probe: Probe) -> tuple[float, ...]:
        """Answer `latest` with these weights, and return the engine's answer to the probe under them.

        Raises RunFailed where the first answer is further from the right one than the learner allows.
        """
        async with self._changing:
            loaded = await self.load(weights)
            answer = await asyncio.to_thread(self._engine.probe_answer, weights.version, probe)
            if self._unmeasured is not None:
                await asyncio.to_thread(self._unmeasured.measure, weights, probe, answer)
                self._unmeasured = None
            self.follow_with(loaded)
            await self._drop_unused()
        return answer

    async def take_latest(self, weights: Weights) -> None:
        async with self._changing:
            await super().take_latest(weights)
            await self._drop_unused()

    async def steer(self, arms: Arms) -> list[str]:
        """See `LoadedVersions.steer`; returns a line for a shadow, which a server of text does not ask."""
        unasked = []
        if arms.traffic.shadow is not None:
            unasked = [f"shadow={arms.traffic.shadow}: a server of text asks none; set it to 0"]
            arms = replace(arms, traffic=replace(arms.traffic, shadow=None))
        async with self._changing:
            wrong = await super().steer(arms)
            await self._drop_unused()
        return unasked + wrong

    async def exactly(self, version: int) -> Choice:
        if self._find(version) is not None:
            return await super().exactly(version)
        async with self._changing:
            choice = await super().exactly(version)
            await self._drop_unused()
        return choice

    @contextmanager
    def in_use(self, loaded: Loaded | None) -> Iterator[None]:
        """Keep a version loaded for a request that uses the engine several times; None: no version."""
        if loaded is None:
            yield
            return
        self._in_use[loaded.version] += 1
        try:
            yield
        finally:
            self._in_use[loaded.version] -= 1
            self._in_use += Counter()  # drop counts of 0

    async def _drop_unused(self) -> None:
        """Drop the adapters that answer no arm and no request; one that still answers stays."""
        for version in sorted({*self._engine.versions} - self.served().keys() - self._in_use.keys()):
            await asyncio.to_thread(self._engine.drop, version)
