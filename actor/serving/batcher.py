"""Requests that come at the same time share a forward pass.

    ask ─► waiting ─► as many as are expected, or the longest wait over ─► one pass per version ─► answers
        └─ alone, and no other is expected ───────────────────────────────────┘

How many are expected is learned: now and then a pass is held back to see how many come. A pass that takes
long runs in a thread, and requests that come meanwhile make the next one; a short one would only be slower
there, for it holds the interpreter either way. One event loop uses it.
"""

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.policy.acting.acting_policy import Acted
from penstock.policy.policy import Policy
from penstock.protocol.refusal import Reason, Refusal, Refused
from penstock.protocol.tensor import Array, all_finite
from penstock.registry.routing import Arm
from penstock.runtime import metrics
from penstock.runtime.compute_threads import ComputePool

# ---- One forward pass answers many requests with one version of the policy.

Reals = NDArray[np.floating]


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A version whose weights are in a policy: never changed, and used by one thread at a time."""

    policy: Policy
    version: int
    update: int
    sha256: str
    random: np.random.Generator = field(default_factory=np.random.default_rng)


@dataclass(slots=True, kw_only=True, eq=False)
class Question:
    """A request that was read. observation: by name, [rows, *shape], with the policy's state if any."""

    observation: Mapping[str, Array]
    rows: int
    deterministic: bool = False
    seed: int | None = None
    masks: Mapping[str, NDArray[np.bool_]] | None = None
    distribution: bool = False
    value: bool = False
    taken: Mapping[str, Array] | None = None
    """How likely are these actions, as drawn, instead of new ones?"""
    episode_id: str = ""
    request_id: str = ""

    @property
    def shares_draw(self) -> bool:
        """Return whether one random draw can serve this request together with others."""
        is_own = self.deterministic or self.distribution
        return self.seed is None and self.masks is None and self.taken is None and not is_own


@dataclass(slots=True)
class Pass:
    """One forward pass: its rows, and the seconds that its own version took."""

    rows: int
    seconds: float


@dataclass(slots=True, eq=False)
class Answer:
    """What one forward pass answers.

    action: by name, as drawn, [rows, *shape].
    ready: as the environment takes it; nothing of what was `taken`.
    log_prob, value: float32 [rows].   distribution: by name.
    state: the policy's after this step, by name, [rows, *shape].
    passed: the pass that it comes from; None where it was not timed.
    """

    loaded: Loaded
    action: Mapping[str, Array]
    ready: Mapping[str, Array]
    log_prob: NDArray[np.float32]
    distribution: Mapping[str, Reals] | None = None
    value: NDArray[np.float32] | None = None
    state: Mapping[str, Array] = field(default_factory=dict)
    passed: Pass | None = None


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


class NotFinite(ArithmeticError):
    """The network answered NaN or infinity to a finite observation."""


def answer(loaded: Loaded, questions: Sequence[Question]) -> Sequence[Answer | NotFinite]:
    """Return an answer per question, in order; neighbours in the pass change it by rounding at most."""
    policy, observation = loaded.policy, questions[0].observation
    if len(questions) > 1:
        together = [question.observation for question in questions]
        observation = {name: np.concatenate([rows[name] for rows in together]) for name in observation}
    step = policy.step(observation)
    parameters = step.parameters
    values = policy.values(observation) if any(question.value for question in questions) else None
    if all(question.shares_draw for question in questions):
        try:
            return _split(loaded, questions, policy.choose(parameters, loaded.random), values, step.state)
        except FloatingPointError:
            pass  # Somebody's rows: each is answered on its own.
    start, answers = 0, list[Answer | NotFinite]()
    for question in questions:
        rows = slice(start, start + question.rows)
        part = None if values is None or not question.value else values[rows]
        state = {name: array[rows] for name, array in step.state.items()}
        answers.append(_single(loaded, question, parameters[rows], part, state))
        start += question.rows
    return answers


def _split(
    loaded: Loaded,
    questions: Sequence[Question],
    acted: Acted,
    values: NDArray[np.float32] | None,
    state: Mapping[str, Array],
) -> Sequence[Answer | NotFinite]:
    log_prob = acted.log_prob
    whole = Answer(loaded, acted.action, ready(loaded.policy, acted), log_prob, None, values, state)
    answers = [whole]
    if len(questions) > 1:
        ends = accumulate([question.rows for question in questions])
        answers = [_part(whole, question, end) for question, end in zip(questions, ends, strict=True)]
    if _is_finite(log_prob) and _is_finite(values):
        return answers
    return [_finite(given) for given in answers]


def _part(whole: Answer, question: Question, end: int) -> Answer:
    """Return the part of the answer that belongs to a question whose rows end before `end`."""
    rows = slice(end - question.rows, end)
    action = {name: array[rows] for name, array in whole.action.items()}
    return Answer(
        whole.loaded,
        action,
        action if whole.ready is whole.action else {name: array[rows] for name, array in whole.ready.items()},
        whole.log_prob[rows],
        None,
        whole.value[rows] if whole.value is not None and question.value else None,
        whole.state and {name: array[rows] for name, array in whole.state.items()},
    )


def ready(policy: Policy, acted: Acted) -> Mapping[str, Array]:
    """Return the actions as the environment takes them, by name; `acted.action` where that is as drawn."""
    action = acted.action
    made = {head.path: head.to_environment(action[head.path]) for head in policy.action_heads}
    return action if all(made[name] is array for name, array in action.items()) else made


def _single(
    loaded: Loaded,
    question: Question,
    parameters: Reals,
    value: NDArray[np.float32] | None,
    state: Mapping[str, Array],
) -> Answer | NotFinite:
    policy, action = loaded.policy, question.taken
    as_taken: Mapping[str, Array] = {}
    try:
        if action is None:
            random = loaded.random if question.seed is None else np.random.default_rng(question.seed)
            acted = policy.choose(
                parameters, random, deterministic=question.deterministic, masks=question.masks
            )
            action, as_taken, log_prob = acted.action, ready(policy, acted), acted.log_prob
        else:
            log_prob = policy.chance(parameters, action, question.masks)
    except FloatingPointError as error:
        return NotFinite(f"version {loaded.version}: {error}")
    described = policy.distribution(parameters, question.masks) if question.distribution else None
    return _finite(Answer(loaded, action, as_taken, log_prob, described, value, state))


def _finite(given: Answer) -> Answer | NotFinite:
    """The answer, unless its log-probability or its value is no number."""
    for name, numbers in (("log-probability", given.log_prob), ("value", given.value)):
        if not _is_finite(numbers):
            return NotFinite(f"version {given.loaded.version}: the {name} is not finite")
    return given


def _is_finite(numbers: NDArray[np.float32] | None) -> bool:
    return numbers is None or all_finite(numbers)


# ---- What a forward pass of so many rows takes, learned from those that were made.

_NEWEST: Final = 0.2
"""Weight of the newest pass in a size's average."""


class PassCost:
    """Expected seconds of a forward pass by its rows."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._nearest: dict[int, int] = {}
        """The nearest size with measurements, by requested size."""

    def note(self, rows: int, seconds: float) -> None:
        size = rows.bit_length()
        if size not in self._seconds:
            self._nearest.clear()
        known = self._seconds.get(size, seconds)
        self._seconds[size] = known + _NEWEST * (seconds - known)

    def of(self, rows: int) -> float:
        """Return what one pass of so many rows is expected to take; 0 while nothing is known."""
        if not self._seconds:
            return 0.0
        size = rows.bit_length()
        if size not in self._nearest:
            smaller = [known for known in self._seconds if known <= size]
            self._nearest[size] = max(smaller) if smaller else min(self._seconds)
        return self._seconds[self._nearest[size]]

    def of_many(self, rows: int, most: int) -> float:
        """Return the seconds that rows take in passes of at most `most` rows."""
        if 0 < rows <= most:
            return self.of(rows)
        full, rest = divmod(rows, most)
        return full * self.of(most) + (self.of(rest) if rest else 0.0)


INLINE_S: Final = 0.0005
"""A pass that is expected to take less of a core does not leave the event loop's thread."""
_LEAST_PROBE: Final = 16
_MOST_PROBE: Final = 1024


@dataclass(slots=True, eq=False)
class PendingQuestion:
    """A question that is not answered yet. loaded: the version that answers; None: none could be chosen.

    since_s, until_s: when it came, and its deadline, by the clock of the event loop.
    on_result: called with this and the answer; or Refused (DEADLINE), NotFinite, or the version's error.
    is_gone: returns whether the answer is no longer wanted; then `on_result` is not called.
    """

    loaded: Loaded | None
    question: Question
    until_s: float
    since_s: float
    on_result: Callable[[Any, Answer | Exception], None]
    is_gone: Callable[[], bool]


class Batcher:
    """Lets requests that come at the same time share a pass. Seconds are those of the event loop's clock."""

    def __init__(self, *, max_rows: int, max_wait_s: float, max_delay_s: float) -> None:
        self._max_rows, self._max_wait_s, self._max_delay_s = max_rows, max_wait_s, max_delay_s
        self._loop = asyncio.get_running_loop()
        self._threads = ComputePool(1, "inference")
        self._waiting: list[PendingQuestion] = []
        self._rows = 0
        self._expected = 1
        self._until_probe = self._probe_every = _LEAST_PROBE
        self._timer: asyncio.Handle | None = None
        self._probes = max_wait_s > 0 and max_rows > 1
        self._is_probe = self._is_busy = self._is_due = False
        # By the clock, which is what a client must wait; and of a core.
        self._cost, self._work = PassCost(), PassCost()
        self._under_way = 0

    def ask(self, loaded: Loaded, question: Question, until_s: float = math.inf) -> "asyncio.Future[Answer]":
        """Return the answer; raises as `put`, and the future Refused (DEADLINE) and NotFinite."""
        future = self._loop.create_future()
        settle = partial(_settle, future)
        self.put(PendingQuestion(loaded, question, until_s, self._loop.time(), settle, future.done))
        return future

    def put(self, pending: PendingQuestion) -> None:
        """Queue a question; `on_result` is called after its pass, perhaps before this returns.

        Raises Refused (OVERLOADED) when the wait for its pass would be too long.
        """
        rows, now = pending.question.rows, pending.since_s
        if self._is_lonely() and pending.until_s >= now:
            self._until_probe -= 1
            self._answer([pending], rows, now)
            return
        delay_s = self._cost.of_many(self._rows, self._max_rows)
        if self._under_way:
            delay_s += self._cost.of_many(self._under_way, self._max_rows)
        if delay_s > self._max_delay_s:
            raise Refused(
                Refusal(
                    reason=Reason.OVERLOADED,
                    detail=f"{self._rows} observations wait, about {delay_s * 1e3:.0f} ms of work",
                    retry_after_ms=math.ceil(delay_s * 1e3),
                )
            )
        self._waiting.append(pending)
        self._rows += rows
        # Once its pass is due all the others of this round of the loop come along.
        if not (self._is_busy or self._is_due):
            self._arrange()

    @property
    def is_busy(self) -> bool:
        return bool(self._rows or self._is_busy or self._is_due)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._threads.shutdown()

    def _is_lonely(self) -> bool:
        """Return whether no request waits, no other is expected, and no probe is due."""
        is_idle = not (self._rows or self._is_busy or self._is_due)
        return is_idle and self._expected == 1 and (self._until_probe > 1 or not self._probes)

    def _arrange(self) -> None:
        if self._rows >= self._max_rows or (len(self._waiting) >= self._expected and not self._is_probe):
            self._until_probe -= 1
            if self._until_probe > 0 or self._rows >= self._max_rows:
                self._schedule(0.0)
                return
            self._is_probe = True
            self._schedule(self._max_wait_s)
        elif self._timer is None:
            self._schedule(self._max_wait_s)

    def _schedule(self, wait_s: float) -> None:
        if self._timer is not None:
            if wait_s > 0 or self._is_due:
                return
            self._timer.cancel()
        if wait_s > 0:
            self._timer = self._loop.call_later(wait_s, self._waited)
        else:
            self._is_due, self._timer = True, self._loop.call_soon(self._pass)

    def _waited(self) -> None:
        """End the longest wait, and expect as many requests as came in that time."""
        came = len(self._waiting)
        if self._is_probe:
            # Alone again: look less often.
            alone = came <= 1
            self._probe_every = min(_MOST_PROBE, self._probe_every * 2) if alone else _LEAST_PROBE
        self._expected, self._is_probe, self._until_probe = max(1, came), False, self._probe_every
        self._pass()

    def _pass(self) -> None:
        # A client that is refused as late may ask again at once; no other pass begins within this one.
        self._is_due, self._timer = True, None
        now = self._loop.time()
        batch, rows = self._take(now)
        self._is_due = False
        self._expected = max(self._expected, len(batch))
        if batch:
            self._answer(batch, rows, now)
        else:
            self._go_on()

    def _answer(self, batch: list[PendingQuestion], rows: int, now: float) -> None:
        metrics.SERVING_BATCH_ROWS.observe(rows)
        metrics.SERVING_QUEUE_SECONDS.observe(now - batch[0].since_s)
        # Not by the clock: a pass that others interrupt would be sent to the thread, where it waits for the
        # interpreter each time and would never seem short again.
        if self._work.of(rows) < INLINE_S:
            self._note(rows, _answer_all(batch))
            self._go_on()
            return
        self._is_busy, self._under_way = True, rows
        running = self._loop.run_in_executor(self._threads, _answer_all, batch)
        running.add_done_callback(lambda done: self._passed(rows, done))

    def _take(self, now: float) -> tuple[list[PendingQuestion], int]:
        """Return the requests of the next pass and their rows, without those that are late or gone."""
        rows = count = 0
        batch: list[PendingQuestion] = []
        for pending in self._waiting:
            if batch and rows + pending.question.rows > self._max_rows:
                break
            count += 1
            self._rows -= pending.question.rows
            if pending.is_gone():
                continue
            if pending.until_s < now:
                text = f"waited {(now - pending.since_s) * 1e3:.0f} ms for its turn; give the call more time"
                pending.on_result(pending, Refused(Refusal(reason=Reason.DEADLINE, detail=text)))
                continue
            rows += pending.question.rows
            batch.append(pending)
        del self._waiting[:count]
        return batch, rows

    def _passed(self, rows: int, done: "asyncio.Future[_Outcome]") -> None:
        self._is_busy, self._under_way = False, 0
        self._note(rows, done.result())
        self._go_on()

    def _go_on(self) -> None:
        """Schedule a pass for requests that came meanwhile, unless a callback has begun one already."""
        if self._waiting and not (self._is_busy or self._is_due):
            self._schedule(0.0)

    def _note(self, rows: int, outcome: "_Outcome") -> None:
        answers, seconds, cpu_s = outcome
        self._cost.note(rows, seconds)
        self._work.note(rows, cpu_s)
        for pending, result in answers:
            if not pending.is_gone():
                pending.on_result(pending, result)


def _settle(future: "asyncio.Future[Answer]", _pending: PendingQuestion, result: Answer | Exception) -> None:
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)


_Outcome = tuple[list[tuple[PendingQuestion, Answer | Exception]], float, float]
"""Answers, and the seconds that they took by the clock and of a core."""


def _answer_all(batch: Sequence[PendingQuestion]) -> _Outcome:
    began, began_cpu = time.perf_counter(), time.thread_time()
    by_version: dict[Any, list[PendingQuestion]] = defaultdict(list)
    for pending in batch:
        by_version[pending.loaded].append(pending)
    answers: list[tuple[PendingQuestion, Answer | Exception]] = []
    group_began = began
    for loaded, group in by_version.items():
        given = _answer(loaded, [pending.question for pending in group])
        now = time.perf_counter()
        passed = Pass(sum([pending.question.rows for pending in group]), now - group_began)
        group_began = now
        for answered in given:
            if answered.__class__ is Answer:
                answered.passed = passed
        answers += zip(group, given, strict=True)
    return answers, group_began - began, time.thread_time() - began_cpu


def _answer(loaded: Loaded, questions: list[Question]) -> Sequence[Answer | Exception]:
    try:
        return answer(loaded, questions)
    except Exception as error:  # noqa: BLE001 - handed to each caller, whose fallback answers
        return [error] * len(questions)
