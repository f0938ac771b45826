"""Asks the chosen version, and answers with the declared fallback where it cannot answer.

    choice ─► ask (one forward pass for many) ─► Answered ─► the shadow is asked afterwards, if there is one
                  └─ cannot answer ─► fall back: the version before it, else the declared action

Questions come in as arrays and leave as arrays: what a message looks like is known to `requests` alone.
"""

import asyncio
import copy
import json
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Final

import numpy as np

from penstock.actor.serving.batcher import Answer, Asked, Batcher, Loaded, NotFinite, Question, answer
from penstock.actor.serving.loaded_versions import Choice, LoadedVersions
from penstock.config.settings import ConfigurationError, ServingSection
from penstock.protocol.refusal import Reason, Refusal, Refused
from penstock.protocol.spaces import Box, Discrete, Leaf, MultiBinary, MultiDiscrete, Space, flatten, leaves
from penstock.protocol.tensor import Array
from penstock.registry.routing import Arm
from penstock.runtime import metrics
from penstock.runtime.compute_threads import ComputePool
from penstock.runtime.lifecycle import give_way

# ---- Actions when no version can answer: the one that the configuration names, or a uniform draw.

Draw = Callable[[int], Mapping[str, Array]]
"""Actions for so many rows, by name, as the environment takes them."""


FALLBACKS: Final = ("", "previous", "fixed", "uniform")
"""Names of what can answer in place of the chosen version; "": that version itself."""


class Fallback:
    """The fallback of one server, as `serving.fallback` declares it."""

    def __init__(self, section: ServingSection, space: Space) -> None:
        """space: of actions. Raises ConfigurationError where the declared action is none of the space's."""
        self.is_previous = section.fallback == "previous"
        """Whether the version that answered before is asked first."""
        self._name = "uniform" if self.is_previous else section.fallback
        self._draw: Draw | None = None
        if self._name == "uniform":
            self._draw = uniform(space)
        elif self._name == "fixed":
            self._draw = fixed(space, section)

    def draw(self, rows: int) -> tuple[str, Mapping[str, Array]]:
        """Return its name and actions by name, [rows, *shape]; raises Refused (NOT_READY) without one."""
        if self._draw is None:
            text = "no version can answer, and serving.fallback=none"
            raise Refused(Refusal(reason=Reason.NOT_READY, detail=text, retry_after_ms=1000))
        return self._name, self._draw(rows)


def uniform(space: Space) -> Draw:
    """Every value of a bounded leaf as likely as any other; a normal draw where there are no bounds."""
    random = np.random.default_rng()
    every = list(leaves(space, "action"))

    def draw(rows: int) -> Mapping[str, Array]:
        return {name: _draw(leaf, rows, random).astype(leaf.dtype) for name, leaf in every}

    return draw


def fixed(space: Space, section: ServingSection) -> Draw:
    """`serving.fallback_action`; raises ConfigurationError when it is none of the space's."""
    given = section.fallback_action
    if given is None:
        raise ConfigurationError(
            "serving.fallback=fixed: name the action, --set serving.fallback_action=VALUE"
        )
    try:
        values = flatten(space, given, "action")
        single = {name: _value(leaf, values[name]) for name, leaf in leaves(space, "action")}
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise ConfigurationError(f"serving.fallback_action={given!r}: not in {space!r} ({error})") from error
    return lambda rows: {name: np.repeat(value[np.newaxis], rows, 0) for name, value in single.items()}


def _value(leaf: Leaf, given: Any) -> Array:
    value: Any = np.asarray(given, leaf.dtype)
    if not np.issubdtype(value.dtype, np.floating) and not np.array_equal(value, np.asarray(given)):
        raise ValueError(f"{leaf.dtype} is wanted")
    if value.shape != leaf.shape:
        raise ValueError(f"shape {value.shape}, {leaf.shape} is wanted")
    low, high = _bounds(leaf)
    if not ((value >= low) & (value <= high)).all():
        raise ValueError(f"{value.tolist()} lies outside")
    array: Array = value
    return array


def _bounds(leaf: Leaf) -> tuple[Any, Any]:
    """Lowest and highest values, both allowed."""
    match leaf:
        case Box():
            return leaf.low, leaf.high
        case Discrete():
            return leaf.start, leaf.start + leaf.n - 1
        case MultiDiscrete():
            return 0, np.asarray(leaf.nvec) - 1
        case MultiBinary():
            return 0, 1


def _draw(leaf: Leaf, rows: int, random: np.random.Generator) -> Any:
    low, high = _bounds(leaf)
    shape = (rows, *leaf.shape)
    if not isinstance(leaf, Box) or not leaf.dtype.startswith("float"):
        return random.integers(low, high, shape, endpoint=True)
    bounded = np.isfinite(low) & np.isfinite(high)
    with np.errstate(invalid="ignore"):
        inside = low + random.random(shape) * (high - low)
    return np.where(bounded, inside, np.clip(random.standard_normal(shape), low, high))


# ---- A second version that is asked what a first one has answered: its answers reach no client and delay
# none.

MAX_ROWS: Final = 1024
"""Most observations that wait for the shadow; with one request more there may be as many again."""
GRACE_S: Final = 0.005
"""After which a reply is written; within it others come and share the pass."""
_LEAST_PRIORITY: Final = 19
_MOST_BYTES: Final = 64 * 2**20
_MOST_WAITING_ROWS: Final = 16_384
"""Of all requests together: one may have a thousand, each with an action and a distribution."""
_LEAST_ROWS: Final = 4
"""As so many rows a smaller request counts: it has names and an object of its own."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """shadow: who is asked.   arm, question, given: what was answered, and to whom."""

    shadow: Loaded
    arm: Arm
    question: Question
    given: Answer


class Shadow:
    """Used by one event loop."""

    def __init__(self, batcher: Batcher, record: "ShadowRecord | None") -> None:
        """batcher: of the clients, who go first. record: where the shadow's answers are kept, if they are."""
        self._batcher, self._record = batcher, record
        self._loop = asyncio.get_running_loop()
        self._thread = ComputePool(1, "shadow", partial(give_way, _LEAST_PRIORITY))
        self._waiting: deque[_Waiting] = deque()
        self._rows = 0
        self._timer: asyncio.TimerHandle | None = None
        self._running: asyncio.Future[Sequence[Answer | Exception]] | None = None
        self._copy: tuple[Loaded, Loaded] | None = None

    def compare(self, shadow: Loaded, arm: Arm, question: Question, given: Answer) -> None:
        """Ask `shadow`, later, how likely it finds this answer; left out while too many wait."""
        if self._rows >= MAX_ROWS:
            metrics.SHADOW_SHED.inc()
            return
        self._waiting.append(_Waiting(shadow, arm, question, given))
        self._rows += question.rows
        self._arrange()

    async def finish(self) -> None:
        """Ask what waits, clients or not, and note it."""
        while self._waiting or self._running is not None:
            if self._running is None:
                self._begin()
            else:
                await asyncio.wait([self._running])
                await asyncio.sleep(0)  # for the callback that notes it

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._waiting.clear()
        self._thread.shutdown()

    def _arrange(self) -> None:
        if self._timer is None and self._running is None and self._waiting:
            self._timer = self._loop.call_later(GRACE_S, self._grace_is_over)

    def _grace_is_over(self) -> None:
        self._timer = None
        if self._batcher.is_busy:
            self._arrange()
        elif self._running is None:
            self._begin()

    def _begin(self) -> None:
        """One pass for those that the same version is asked, as far as they came behind one another."""
        shadow, group = self._waiting[0].shadow, list[_Waiting]()
        while self._waiting and self._waiting[0].shadow is shadow:
            group.append(self._waiting.popleft())
        self._rows -= sum(each.question.rows for each in group)
        self._running = self._loop.run_in_executor(self._thread, self._ask, shadow, group)
        self._running.add_done_callback(partial(self._note, group))

    def _ask(self, shadow: Loaded, group: list[_Waiting]) -> Sequence[Answer | Exception]:
        """In the thread."""
        began = time.thread_time()
        described = self._record is not None
        questions = [
            replace(each.question, taken=each.given.action, distribution=described, value=False)
            for each in group
        ]
        try:
            return answer(self._own(shadow), questions)
        except Exception as error:  # noqa: BLE001 - noted with each; clients have their answers
            return [error] * len(group)
        finally:
            metrics.SHADOW_SECONDS.inc(time.thread_time() - began)

    def _own(self, shadow: Loaded) -> Loaded:
        """The thread's copy: a version is used by one thread at a time."""
        if self._copy is None or self._copy[0] is not shadow:
            self._copy = shadow, replace(shadow, policy=copy.deepcopy(shadow.policy))
        return self._copy[1]

    def _note(self, group: list[_Waiting], done: "asyncio.Future[Sequence[Answer | Exception]]") -> None:
        self._running = None
        self._arrange()
        if done.cancelled():
            return
        for each, said in zip(group, done.result(), strict=True):
            agreement = 0.0
            if isinstance(said, Answer):
                agreement = float(np.exp(np.minimum(said.log_prob, 0.0)).mean())
            metrics.SHADOW_AGREEMENT.observe(agreement)
            if self._record is not None:
                self._record.note(each.arm, each.question, each.given, each.shadow.version, said)


class ShadowRecord:
    """A file that grows by `note`; used by one event loop, and written by a thread of its own."""

    def __init__(self, path: Path) -> None:
        """path: made with the first line; each server needs a file of its own."""
        self._file = _File(path, maxBytes=_MOST_BYTES, backupCount=1, encoding="utf-8", delay=True)
        self._thread = ComputePool(1, "shadow-record")
        self._lock, self._waiting_rows, self._is_closed = threading.Lock(), 0, False

    def note(
        self, arm: Arm, question: Question, answered: Answer, shadow: int, other: Answer | BaseException
    ) -> None:
        """Note what was answered, and what version `shadow` says of it or why it could not."""
        rows = max(question.rows, _LEAST_ROWS)
        with self._lock:
            has_room = self._waiting_rows < _MOST_WAITING_ROWS and not self._is_closed
            self._waiting_rows += rows if has_room else 0
        if not has_room:
            metrics.SHADOW_UNRECORDED.inc()
            return
        # Of the question the thread gets names alone.
        line = {
            "time": time.time(),
            "episode_id": question.episode_id,
            "request_id": question.request_id,
            "answered": {"version": answered.loaded.version, "arm": str(arm)},
            "shadow": {"version": shadow},
        }
        self._thread.submit(self._write, rows, line, answered, other)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True  # an answer under way may still come
        self._thread.shutdown()
        self._file.close()

    def _write(
        self, rows: int, line: dict[str, Any], answered: Answer, other: Answer | BaseException
    ) -> None:
        record = logging.makeLogRecord({})
        try:
            line["answered"] |= {"action": _lists(answered.action), "log_prob": answered.log_prob.tolist()}
            if isinstance(other, BaseException):
                line["shadow"]["error"] = str(other)
            else:
                described = _lists(other.distribution or {})
                line["shadow"] |= {"log_prob": other.log_prob.tolist(), "distribution": described}
            record.msg = json.dumps(line, separators=(",", ":"))
            self._file.handle(record)
        except (TypeError, ValueError):
            self._file.handleError(record)
        finally:
            with self._lock:
                self._waiting_rows -= rows


def open_shadow_record(section: ServingSection, run_dir: Path | None) -> ShadowRecord | None:
    """Return the file, None where no place is; raises ConfigurationError for a named one without access."""
    named = section.shadow_record
    path = named or (run_dir / "shadow.jsonl" if run_dir is not None else None)
    if path is None:
        return None
    if os.access(path.parent, os.W_OK):
        return ShadowRecord(path)
    if named is None:
        return None  # a folder that is only read
    raise ConfigurationError(
        f"serving.shadow_record={str(named)!r}: its folder is not there or cannot be written to; name a "
        "file in one that can"
    )


class _File(RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's own name
        """A full disk costs the record, not the answers."""
        metrics.SHADOW_UNRECORDED.inc()
        why = str(sys.exc_info()[1])
        log.error("a shadow's answer was not recorded", extra={"file": self.baseFilename, "why": why})


def _lists(arrays: Mapping[str, Array]) -> dict[str, Any]:
    return {name: array.tolist() for name, array in arrays.items()}


@dataclass(slots=True)
class Answered:
    """The answer that a client gets.

    action: by name, as the environment takes it, [rows, *shape].
    answer: of a policy; None where an action was drawn without one.
    fallback: "" or its name.   not_finite: whether it was needed because of numbers that are none.
    is_to_blame: whether the canary could not answer what another version could.
    """

    arm: Arm
    action: Mapping[str, Array]
    answer: Answer | None
    fallback: str
    not_finite: bool = False
    is_to_blame: bool = False


OnAnswer = Callable[[Answered | Exception], None]
"""Takes the answer, Refused, or an error that was not foreseen; raises nothing."""


@dataclass(slots=True, eq=False)
class _Asked(Asked):
    """A client's question, and the choice that was made for it."""

    choice: Choice
    on_answer: OnAnswer


class Answerer:
    """Used by one event loop. Times `until_s` are seconds of that loop's clock."""

    def __init__(
        self,
        loaded_versions: LoadedVersions,
        batcher: Batcher,
        fallback: Fallback,
        shadow: Shadow,
        on_failure: Callable[[Loaded, Question, Exception], None],
        on_unanswered: Callable[[Answered], None],
    ) -> None:
        """on_failure: takes each version that failed. on_unanswered: takes what is refused."""
        self._loaded_versions, self._batcher = loaded_versions, batcher
        self._fallback, self._shadow = fallback, shadow
        self._on_failure, self._on_unanswered = on_failure, on_unanswered
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._count = {
            (arm, name): metrics.ANSWERS.labels(arm, name or "none").inc for arm in Arm for name in FALLBACKS
        }

    def ask(
        self,
        choice: Choice,
        question: Question,
        until_s: float,
        on_answer: OnAnswer,
        is_gone: Callable[[], bool],
    ) -> None:
        """Ask the chosen version, else the fallback, without waiting; raises Refused (OVERLOADED).

        on_answer: called once, with the pass or before this returns, unless the answer `is_gone`: unwanted.
        """
        now = self._loop.time()
        asked = _Asked(choice.loaded, question, until_s, now, self._heard, is_gone, choice, on_answer)
        if choice.loaded is None:
            self._begin(self._fall_back(asked, None))
        else:
            self._batcher.put(asked)

    def ask_exactly(
        self,
        version: int,
        question: Question,
        until_s: float,
        on_answer: OnAnswer,
        is_gone: Callable[[], bool],
    ) -> None:
        """Ask as `ask` does a version, which may have to be loaded first."""

        async def load_and_ask() -> None:
            try:
                choice = await self._loaded_versions.exactly(version)
                self.ask(choice, question, until_s, on_answer, is_gone)
            except Exception as error:  # noqa: BLE001 - for the caller
                on_answer(error)

        self._begin(load_and_ask())

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _heard(self, asked: _Asked, said: Answer | Exception) -> None:
        if isinstance(said, Answer):
            try:
                asked.on_answer(self._complete(asked, said))
            except Exception as error:  # noqa: BLE001 - others share the pass
                asked.on_answer(error)
        elif isinstance(said, Refused):
            asked.on_answer(said)
        else:
            self._begin(self._fall_back(asked, said))

    def _complete(self, asked: _Asked, answer: Answer) -> Answered:
        """Turn the answer of the chosen version into the client's, and have the shadow asked afterwards."""
        choice = asked.choice
        if choice.is_previous:
            blames = choice.arm is Arm.CANARY
            return self._count_in(
                asked, Answered(choice.arm, answer.ready, answer, "previous", False, blames)
            )
        if choice.arm is not Arm.PINNED:
            self._loaded_versions.note_answered(choice.arm, answer.loaded)
        if choice.shadow is not None:
            self._shadow.compare(choice.shadow, choice.arm, asked.question, answer)
        return self._count_in(asked, Answered(choice.arm, answer.ready, answer, ""))

    async def _fall_back(self, asked: _Asked, error: Exception | None) -> None:
        """Answer in place of the chosen version, which failed with `error`; None: there was none to ask."""
        try:
            asked.on_answer(await self._of_fallback(asked, error))
        except Exception as refused:  # noqa: BLE001 - for the caller
            asked.on_answer(refused)

    async def _of_fallback(self, asked: _Asked, error: Exception | None) -> Answered:
        """Raises Refused where the configuration names no fallback, or the time is over."""
        choice, not_finite = asked.choice, isinstance(error, NotFinite)
        if choice.loaded is not None and error is not None:
            self._on_failure(choice.loaded, asked.question, error)
        answer = await self._of_another(asked)
        is_to_blame = choice.arm is Arm.CANARY and answer is not None
        blame = {"not_finite": not_finite, "is_to_blame": is_to_blame}
        if answer is not None and self._fallback.is_previous:
            return self._count_in(asked, Answered(choice.arm, answer.ready, answer, "previous", **blame))
        try:
            name, action = self._fallback.draw(asked.question.rows)
        except Refused:
            self._on_unanswered(Answered(choice.arm, {}, None, "none", **blame))
            raise
        return self._count_in(asked, Answered(choice.arm, action, None, name, **blame))

    async def _of_another(self, asked: _Asked) -> Answer | None:
        """Return the answer of a version that could stand in; the active one's blames a canary."""
        choice = asked.choice
        others = (
            [self._loaded_versions.former(choice.arm, choice.loaded)] if self._fallback.is_previous else []
        )
        if choice.arm is Arm.CANARY:
            others.append(self._loaded_versions.active)
        for other in others:
            if other is None or other is choice.loaded:
                continue
            try:
                return await self._batcher.ask(other, asked.question, asked.until_s)
            except Refused:
                raise
            except Exception as error:  # noqa: BLE001 - handed to `on_failure`
                self._on_failure(other, asked.question, error)
        return None

    def _count_in(self, asked: _Asked, answered: Answered) -> Answered:
        metrics.ANSWER_SECONDS.observe(self._loop.time() - asked.since_s)
        self._count[answered.arm, answered.fallback]()
        return answered
