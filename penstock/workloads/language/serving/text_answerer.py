"""An answer of the chosen version, or of the model without its adapter where that cannot go on."""

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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
from penstock.workloads.language.serving.asks import Ask, TextAnswer, TextReply, Thought
from penstock.workloads.language.settings import GuardSection
from penstock.workloads.language.tokenizer import Tokenizer
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
    """Any number of conversations use it.

    penalty: reward of an answer that was blocked, at most 0; 0: it is not learned from.
    """

    guard: Guard
    penalty: float = 0.0

    def check_asked(self, messages: Sequence[Message], arm: Arm) -> None:
        """Raise Refused (INVALID) that names the first message that is blocked, and by what."""
        for index, message in enumerate(messages):
            if message.role == "assistant":
                continue  # what a model has said was checked when it said it, or is its caller's own
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


# ---- The text of an answer while its tokens come: where it is stopped, what is safe to show, calls of
# tools.

OPENING: Final = "<tool_call>"
_CALL: Final = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_UNFINISHED: Final = "\ufffd"
"""What a decoder writes for a character of which not all bytes came."""
_BYTE: Final = re.compile(r"<0x[0-9A-F]{2}>")
"""Token of one byte (byte fallback): a later byte may change the text of all bytes before it."""


class AnswerText:
    """Grows token by token. stops: texts that end it. begins_with: what was written for the model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stops: Sequence[str] = (),
        begins_with: str = "",
        holds_calls: bool = False,
    ) -> None:
        """holds_calls: whether what may be the call of a tool is kept back while it grows."""
        self._tokenizer, self._stops, self._begin = tokenizer, tuple(stops), begins_with
        self._held = (*self._stops, OPENING) if holds_calls else self._stops
        self._ids: list[int] = []
        self._shown, self._settled = 0, len(begins_with)
        self.text = begins_with
        self.is_stopped = False
        self.tokens: list[str] = []
        """Text that each token added."""

    def add(self, token: int) -> None:
        """One more token; where a text of `stops` is complete `text` ends before it, and `is_stopped`."""
        self._ids.append(token)
        before = self.text
        written = self._begin + self._tokenizer.decode(self._ids, skip_special_tokens=True)
        self.tokens.append(written[len(before) :] if written.startswith(before) else "")
        if not _BYTE.fullmatch(str(self._tokenizer.convert_ids_to_tokens(token))):
            self._settled = len(written)
        found = [place for stop in self._stops if (place := written.find(stop)) >= 0]
        self.is_stopped = bool(found)
        self.text = written[: min(found)] if found else written

    def take_shown(self) -> str:
        """Text that was not taken before and is certain: no part of a stop, a call or half a character."""
        return self._take(self._certain())

    def take_rest(self, message: Message) -> str:
        """What was not taken before of the message that the text has become."""
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
        """The text without what may be the beginning of a stop or a call at its end."""
        begun = (
            length
            for held in self._held
            for length in range(1, min(len(held), len(text) + 1))
            if text.endswith(held[:length])
        )
        return text[: len(text) - max(begun, default=0)]


def as_message(text: str, tools: Collection[dict[str, Any]], call_id: str) -> Message:
    """The assistant's message of a text. call_id: first part of the ids of its calls."""
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
    """Name and arguments of a call, which are text and JSON; None for what is none."""
    try:
        said = json.loads(text)
        name, arguments = said.get("name"), said.get("arguments", {})
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        written.encode()  # half a pair of surrogates has no bytes
    except (ValueError, RecursionError):
        return None
    if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
        return None
    return name, written


# ---- What a model thinks before it answers: how thoughts stand in a row, and how one is drawn.

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

    def before(self, thought: Thought | None) -> tuple[int, ...]:
        if thought is None:
            return self.directly
        end = (self.end,) if thought.is_cut else ()
        return (*self.opens, *thought.ids, *end, *self.closes)


# ---- Answers.

Show = Callable[[int, str], None]
"""Takes text that came to an answer: its index, and the part."""

RETRY_MS: Final = 500
_ENDED: Final = "the server ended before the answer did"
WAITING_PER_ROW: Final = 4
"""Answers that may wait for each that grows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What is answered. ids: of the prompt, as the answers begin behind it. most: tokens of an answer.

    call_id: first part of the ids of its calls of tools.
    """

    ids: tuple[int, ...]
    most: int
    call_id: str


class TextAnswerer:
    """Used by one event loop; the engine has a thread of its own."""

    def __init__(
        self,
        engine: TextEngine,
        tokenizer: Tokenizer,
        section: ServingSection,
        max_rows: int,
        tell: Callable[[Answered], None],
        guard: AnswerGuard | None = None,
        form: ThinkingForm | None = None,
    ) -> None:
        """max_rows: answers that grow at once. tell: told of each answer, and of what could not be.

        guard: what answers pass before anybody sees them; None: nothing is checked. form: how the model
        thinks; None: it answers at once.
        """
        self.guard, self.form = guard, form
        self._engine, self._tokenizer, self._section = engine, tokenizer, section
        self._most_waiting, self._tell = WAITING_PER_ROW * max_rows, tell

    @property
    def whole(self) -> int | None:
        """Tokens of every answer; None: answers end themselves."""
        return None if self.form is None else self.form.answer_tokens

    async def answer(self, choice: Choice, prompt: Prompt, ask: Ask, until_s: float, show: Show) -> TextReply:
        """As many answers as are asked for; raises Refused. until_s: by the clock of the event loop."""

        def replied(answers: tuple[TextAnswer, ...], by: Loaded | None) -> TextReply:
            return TextReply(
                answers=answers,
                version=0 if by is None else by.version,
                update=0 if by is None else by.update,
                arm=choice.arm,
                is_fallback=by is None,
                prompt_tokens=len(prompt.ids),
            )

        shown = False

        def shows(index: int, part: str) -> None:
            nonlocal shown
            shown = show is not no_show
            show(index, part)

        loaded = None if choice.is_previous else choice.loaded
        why = "neither the version nor the model without its adapter can answer"
        if loaded is not None:
            try:
                answers = await self._drawn(loaded.version, prompt, ask, until_s, shows, choice.arm)
            except _Failed as error:
                self._blame(choice.arm, not_finite=isinstance(error.cause, ArithmeticError))
                if shown:
                    raise _not_ready("the version failed behind the part that was sent: ask again") from error
            else:
                if not self._needs_another(answers):
                    self._tell(Answered(arm=choice.arm, action={}, answer=None, fallback=""))
                    return replied(answers, loaded)
                count_not_learned("blocked", sum(len(one.ids) for one in answers))
                self._blame(choice.arm, not_finite=False)
                why = "the guard kept the answer back, and the model without its adapter cannot answer"
        if self._section.fallback == "none":
            raise _not_ready("no version can answer, and serving.fallback=none")
        try:
            answers = await self._drawn(0, prompt, ask, until_s, show, choice.arm)
        except _Failed as error:
            raise _not_ready(why) from error
        return replied(answers, None)

    def _needs_another(self, answers: tuple[TextAnswer, ...]) -> bool:
        """Whether the guard left nothing of what a version said, and nothing is to be learned from it."""
        if self.guard is None or self.guard.penalty or self._section.fallback == "none":
            return False
        return all(one.is_blocked and not one.message.content for one in answers)

    def _blame(self, arm: Arm, *, not_finite: bool) -> None:
        told = Answered(
            arm=arm, action={}, answer=None, fallback="adapter_off", not_finite=not_finite, is_to_blame=True
        )
        self._tell(told)

    async def _drawn(
        self, version: int, prompt: Prompt, ask: Ask, until_s: float, show: Show, arm: Arm
    ) -> tuple[TextAnswer, ...]:
        if self._engine.waiting + ask.count > self._most_waiting:
            text = f"{self._engine.waiting} answers wait already: ask again later, or another server"
            raise Refused(Refusal(reason=Reason.OVERLOADED, detail=text, retry_after_ms=RETRY_MS))
        of = _Drawing(version=version, prompt=prompt, ask=ask, show=show, arm=arm)
        rows = list[asyncio.Future[TextAnswer]]()
        try:
            for index in range(ask.count):
                rows.append(asyncio.ensure_future(self._begun(of, index)))
            async with asyncio.timeout_at(until_s):
                answers = await asyncio.gather(*rows)
        except TimeoutError as error:
            text = (
                "the caller's time was over before the answer was whole; give more, or a smaller max_tokens"
            )
            of.count_stopped()
            raise Refused(Refusal(reason=Reason.DEADLINE, detail=text)) from error
        except asyncio.CancelledError:
            of.count_stopped()
            raise
        finally:
            for row in rows:
                row.cancel()
            for growing in of.begun:
                growing.cancel()
        count_not_learned("thought", sum(one.thought.tokens for one in answers if one.thought is not None))
        return tuple(answers)

    def _begun(self, of: "_Drawing", index: int) -> Coroutine[Any, Any, TextAnswer]:
        """Have the engine begin with an answer, or with the thought before it; what follows it to its end."""
        if self.form is None:
            return self._grown(self._submit(of, index), of)
        asked = of.ask.thought_tokens
        budget = self.form.most if asked is None else asked
        if not budget or of.arm in self._section.arms_without_thought:
            return self._grown(self._submit(of, index, self.form.before(None)), of)
        request = Request(
            ids=(*of.prompt.ids, *self.form.opens),
            most=budget,
            end=self.form.end,
            **of.draws(index, _OTHER_SEED),
        )
        return self._behind(self.form, of.row(self._engine, request), time.monotonic(), of, index)

    async def _behind(
        self, form: ThinkingForm, row: "_Row", began_s: float, of: "_Drawing", index: int
    ) -> TextAnswer:
        """Return an answer behind a thought that grows; raises _Failed, and Refused where the server ends."""
        thought = await self._thought(row, began_s)
        metrics.THOUGHT_TOKENS.labels(of.arm).observe(thought.tokens)
        metrics.THOUGHT_SECONDS.labels(of.arm).observe(thought.milliseconds / 1000.0)
        answer = await self._grown(self._submit(of, index, form.before(thought)), of)
        return replace(answer, thought=self._told(thought, of, answer))

    async def _thought(self, row: "_Row", began_s: float) -> Thought:
        growing = row.growing
        while not growing.finish:
            await row.wait()
        if growing.finish == "cancelled":
            raise _not_ready(_ENDED)
        if growing.finish == "failed":
            raise _Failed(growing.error)
        return Thought(
            tokens=len(growing.ids),
            ids=tuple(growing.ids),
            is_cut=growing.finish == "length",
            milliseconds=1000.0 * (time.monotonic() - began_s),
        )

    def _told(self, thought: Thought, of: "_Drawing", answer: TextAnswer) -> Thought:
        """Its length and cost, and what it says where that was asked for and the guard lets it pass."""
        hidden = replace(thought, ids=())
        if not of.ask.show_thought or answer.is_blocked:
            return hidden
        ids = thought.ids if thought.is_cut else thought.ids[:-1]
        text = str(self._tokenizer.decode(ids, skip_special_tokens=True))
        if self.guard is not None:
            verdict = self.guard.check_whole(text)
            if verdict.is_blocked:
                self.guard.count(verdict, Direction.OUTPUT, of.arm)
                return hidden
        return replace(thought, text=text)

    def _submit(self, of: "_Drawing", index: int, before: tuple[int, ...] = ()) -> "_Growth":
        """Have an answer begun. before: ids behind the prompt."""
        prompt, ask = of.prompt, of.ask
        begins = ask.begins_with
        begin = self._tokenizer(begins, add_special_tokens=False)["input_ids"] if begins else ()
        request = Request(
            ids=(*prompt.ids, *before, *begin),
            most=prompt.most,
            bias=ask.logit_bias,
            presence_penalty=ask.presence_penalty,
            frequency_penalty=ask.frequency_penalty,
            **of.draws(index),
        )
        text = AnswerText(self._tokenizer, stops=ask.stop, begins_with=begins, holds_calls=bool(ask.tools))
        return _Growth(index, of.row(self._engine, request), text, before)

    async def _grown(self, one: "_Growth", of: "_Drawing") -> TextAnswer:
        """Follow one answer to its end; raises _Failed."""
        growing, text, ask, count = one.row.growing, one.text, of.ask, 0
        held = None if self.guard is None else HeldText(self.guard.guard)
        while True:
            # What was written before the end was told is there when it is.
            finish = growing.finish
            while count < len(growing.ids) and not text.is_stopped:
                text.add(growing.ids[count])
                count += 1
            if finish == "failed":
                raise _Failed(growing.error)
            is_over = bool(finish) or text.is_stopped
            whole = self._whole(one, of, count, finish) if is_over else None
            part = text.take_shown() if whole is None else text.take_rest(whole.message)
            if held is not None and self.guard is not None:
                part = held.feed(part) + (held.finish() if is_over else "")
                verdict = self.guard.check_whole(text.text) if is_over and ask.tools else held.verdict
                if held.verdict.is_blocked or verdict.is_blocked:
                    growing.cancel()
                    if part:
                        of.show(one.index, part)
                    self.guard.count(verdict, Direction.OUTPUT, of.arm)
                    # The part that has left, and what was sampled, for the learner alone.
                    return one.answer(
                        count,
                        Message("assistant", held.left),
                        finish="content_filter",
                        tokens=(),
                        ended=False,
                    )
            if part:
                of.show(one.index, part)
            if whole is not None:
                return whole
            await one.row.wait()

    def _whole(self, one: "_Growth", of: "_Drawing", count: int, finish: str) -> TextAnswer:
        """The first `count` tokens as an answer; raises Refused where the server ended it."""
        text = one.text
        if finish == "cancelled" and not text.is_stopped:
            raise _not_ready(_ENDED)
        message = as_message(text.text, of.ask.tools, f"{of.prompt.call_id}-{one.index}")
        is_whole = not text.is_stopped and count == self.whole
        is_cut = finish == "length" and not text.is_stopped and not is_whole
        return one.answer(
            count,
            message,
            finish="length" if is_cut else "tool_calls" if message.tool_calls else "stop",
            tokens=tuple(text.tokens),
            ended=is_whole or (finish == "eos" and not text.is_stopped),
        )


def _not_ready(why: str) -> Refused:
    return Refused(Refusal(reason=Reason.NOT_READY, detail=why, retry_after_ms=RETRY_MS))


class _Row:
    """What the engine lets grow; the running event loop is told of each of its tokens and of its end."""

    def __init__(self, engine: TextEngine, request: Request) -> None:
        loop, self._changed = asyncio.get_running_loop(), asyncio.Event()

        def tell(_: Growing) -> None:
            loop.call_soon_threadsafe(self._changed.set)

        self.growing = engine.submit(request, tell)

    async def wait(self) -> None:
        await self._changed.wait()
        self._changed.clear()


@dataclass(frozen=True, slots=True)
class _Growth:
    """An answer that grows, and its text. before: ids between the prompt and it."""

    index: int
    row: _Row
    text: AnswerText
    before: tuple[int, ...]

    def answer(self, count: int, message: Message, **said: Any) -> TextAnswer:
        """Return the first `count` tokens as an answer."""
        growing = self.row.growing
        ids, log_prob = tuple(growing.ids[:count]), tuple(growing.log_prob[:count])
        return TextAnswer(message=message, ids=ids, log_prob=log_prob, before=self.before, **said)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawing:
    """Answers of one version to one request. begun: all that the engine was given for them."""

    version: int
    prompt: Prompt
    ask: Ask
    show: Show
    arm: Arm
    begun: list[Growing] = field(default_factory=list)

    def row(self, engine: TextEngine, request: Request) -> _Row:
        row = _Row(engine, request)
        self.begun.append(row.growing)
        return row

    def draws(self, index: int, other: int = 0) -> dict[str, Any]:
        """Return how tokens of the answer `index` are drawn. other: of another sequence by the same seed."""
        ask = self.ask
        return {
            "version": self.version,
            "temperature": ask.temperature or 1.0,
            "top_p": ask.top_p,
            "seed": None if ask.seed is None else (ask.seed + index) % 2**64 ^ other,
            "deterministic": ask.temperature == 0.0,
        }

    def count_stopped(self) -> None:
        count_not_learned("stopped", sum(len(growing.ids) for growing in self.begun))


class _Failed(Exception):
    """A version could not go on. cause: its error."""

    def __init__(self, cause: Exception | None) -> None:
        super().__init__(str(cause))
        self.cause = cause


def no_show(_index: int, _part: str) -> None:
    """Show no part of an answer while it grows."""


# ---- The versions that can answer: adapters of one base model, in the engine that generates with them.


class AdapterVersions(LoadedVersions):
    """See `LoadedVersions`. Whatever loads and drops adapters does so one after the other."""

    def __init__(
        self,
        engine: TextEngine,
        policy: Any,
        fetch: Any,
        section: ServingSection,
        tolerance: EngineTolerance | None = None,
    ) -> None:
        """policy: whose network the engine generates with. fetch: see `LoadedVersions`.

        tolerance: measures the engine with the first weights; None: it answers by a plain pass itself.
        """
        super().__init__(lambda: policy, fetch, section)
        self._engine, self._policy = engine, policy
        self._changing, self._unmeasured = asyncio.Lock(), tolerance
        self._in_use = Counter[int]()

    async def load(self, weights: Weights) -> Loaded:
        """See `LoadedVersions.load`; the policy of what is returned is that of all versions."""
        await asyncio.to_thread(self._engine.load, weights.version, weights.blob)
        return Loaded(self._policy, weights.version, weights.update, sha256(weights.blob))

    async def take_probed(self, weights: Weights, probe: Probe) -> tuple[float, ...]:
        """Answer `latest` with these; what the probe says under them, as they are loaded.

        Raises RunFailed for an engine whose first answer the learner would not take.
        """
        async with self._changing:
            loaded = await self.load(weights)
            answer = await asyncio.to_thread(self._engine.probe_answer, weights.version, probe)
            if self._unmeasured is not None:
                await asyncio.to_thread(self._unmeasured.measure, weights, probe, answer)
                self._unmeasured = None
            self.follow_with(loaded)
            await self._let_go()
        return answer

    async def take_latest(self, weights: Weights) -> None:
        async with self._changing:
            await super().take_latest(weights)
            await self._let_go()

    async def steer(self, arms: Arms) -> list[str]:
        """See `LoadedVersions.steer`; a shadow is not asked, and that is said."""
        unasked = []
        if arms.traffic.shadow is not None:
            unasked = [f"shadow={arms.traffic.shadow}: a server of text asks none; set it to 0"]
            arms = replace(arms, traffic=replace(arms.traffic, shadow=None))
        async with self._changing:
            wrong = await super().steer(arms)
            await self._let_go()
        return unasked + wrong

    async def exactly(self, version: int) -> Choice:
        if self._find(version) is not None:
            return await super().exactly(version)
        async with self._changing:
            choice = await super().exactly(version)
            await self._let_go()
        return choice

    @contextmanager
    def in_use(self, loaded: Loaded | None) -> Iterator[None]:
        """Keep a version for a request that comes to the engine several times. None: there is none."""
        if loaded is None:
            yield
            return
        self._in_use[loaded.version] += 1
        try:
            yield
        finally:
            self._in_use[loaded.version] -= 1
            self._in_use += Counter()  # forget those that are in use no more

    async def _let_go(self) -> None:
        """Drop the adapters that answer no arm and no request; one that is answering stays until later."""
        for version in sorted({*self._engine.versions} - self.served().keys() - self._in_use.keys()):
            await asyncio.to_thread(self._engine.drop, version)
