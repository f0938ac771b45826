"""Requests without an episode, and what requests with one share: reading, asking, falling back, replying.

read ─► choose who answers ─► ask (one forward pass for many) ─► reply
                                    └─ cannot answer ─► declared fallback, which says so
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np

from actor.serving.calls.request_errors import Complaints
from actor.serving.codec.arrays import Layout, invalid
from actor.serving.codec.plain_request import Plain, PlainForm
from actor.serving.codec.replies import ARMS, FALLBACKS, ReplyEncoder, answered_by
from actor.serving.inference.batcher import Batcher
from actor.serving.inference.forward_pass import Answer, Loaded, NotFinite, Question
from actor.serving.versions.fallback import Draw
from actor.serving.versions.loaded_versions import Choice, Shelf
from actor.serving.versions.shadow_record import ShadowRecord
from penstock.config.settings import ServingSection
from penstock.registry.routing import Arm
from penstock.runtime import metrics
from penstock.v1 import policy_pb2 as pb
from penstock.wire.refusal import Reason, Refusal, Refused
from penstock.wire.spaces import Dict, Space, leaves, zeros
from penstock.wire.tensor import Array

MAX_REQUEST_ID: Final = 128
_NO_STATE: Final = Dict(())
_NOTHING: Final[dict[str, Array]] = {}


@dataclass(slots=True, kw_only=True)
class Answered:
    """What a client gets. action: by name, as the environment takes it, [rows, *shape].

    answer: of a policy; None where the fallback drew.   fallback: "" or its name.   seconds: since the request came.
    reply: of a plain request, the bytes of its reply, which alone hold what was answered.
    """

    arm: Arm
    action: Mapping[str, Array]
    answer: Answer | None
    fallback: str
    seconds: float
    not_finite: bool = False
    reply: bytes = b""


@dataclass(slots=True)
class Asked:
    """A question, and who was chosen to answer it."""

    choice: Choice
    question: Question
    until_s: float
    began_s: float


Told = Callable[[Asked, Answer | Exception | None], None]
"""Takes what the chosen version said: None: nobody could be asked."""
ToldPlain = Callable[[Answered | Exception], None]
"""Takes the reply to a plain request, or what the version failed with, of which it may not be the cause."""


class Desk:
    """See the module; one event loop uses it."""

    def __init__(
        self,
        spaces: tuple[Space, Space],
        shelf: Shelf,
        batcher: Batcher,
        section: ServingSection,
        draws: Mapping[str, Draw],
        state_space: Dict = _NO_STATE,
        record: ShadowRecord | None = None,
    ) -> None:
        """spaces: of observation and action. draws: the fallbacks that need no policy, by name.

        state_space: of what the policy remembers. record: where shadows' answers are kept, if anywhere.
        """
        self.observation, self.action = Layout("observation", spaces[0]), Layout("action", spaces[1])
        self.shelf, self._batcher, self._section, self._draws = shelf, batcher, section, draws
        self._state, self._state_leaves = Layout("state", state_space), list(leaves(state_space, "state"))
        self.remembers = bool(self._state_leaves)
        self._record = record
        self._encoder = ReplyEncoder(self.action, spaces[1])
        self._plain = PlainForm(section.policy, self.observation, spaces[0], self._encoder)
        self.complaints = Complaints()
        self._answers = {
            (arm, name): metrics.ANSWERS.labels(arm, name or "none") for arm in Arm for name in FALLBACKS
        }

    async def act(self, request: pb.ActRequest, until_s: float) -> Answered:
        """Answer a request without an episode; raises Refused."""
        question = self.read(request)
        if request.version:
            choice = await self.shelf.exactly(request.version)
        else:
            choice = self.shelf.choose(request.client_key)
        return await self.answer(choice, question, until_s)

    def ask_plain(self, data: bytes, until_s: float, tell: ToldPlain, is_gone: Callable[[], bool]) -> bool:
        """`ask` for the bytes of a plain request; False where they must be read as a message. Raises Refused."""
        if self.remembers or not self._plain.holds(data):
            return False
        choice = self.shelf.plainly()
        if choice is None or choice.loaded is None:
            return False
        plain = Plain(self._plain, data, answered_by(choice.loaded.version, choice.arm, ""))
        told = partial(self._told_plain, choice.arm, choice.loaded, time.perf_counter(), tell)
        self._batcher.put(choice.loaded, plain, until_s, told, is_gone)
        return True

    def _told_plain(
        self, arm: Arm, loaded: Loaded, began_s: float, tell: ToldPlain, said: Answer | bytes | Exception
    ) -> None:
        if isinstance(said, Exception):
            tell(said)
            return
        assert isinstance(said, bytes)
        self.shelf.note_answered(arm, loaded)
        tell(self._given(arm, began_s, reply=said))

    def ask(self, request: pb.ActRequest, until_s: float, tell: Told, is_gone: Callable[[], bool]) -> None:
        """Ask for who names neither an episode nor a version, without waiting; raises Refused.

        tell: called with the pass, or before this returns. is_gone: whether nobody wants the answer any more.
        """
        question = self.read(request)
        self.put(self.shelf.choose(request.client_key), question, until_s, tell, is_gone)

    def put(
        self, choice: Choice, question: Question, until_s: float, tell: Told, is_gone: Callable[[], bool]
    ) -> None:
        """`ask` for what was read, of who was chosen."""
        asked = Asked(choice, question, until_s, time.perf_counter())
        if choice.loaded is None:
            tell(asked, None)
        else:
            self._batcher.put(choice.loaded, question, until_s, partial(tell, asked), is_gone)

    def read(self, request: pb.ActRequest) -> Question:
        """What is asked; raises Refused (INVALID) for what cannot be answered."""
        self.check_call(request.policy, request.request_id)
        batch = request.batch
        if batch > self._section.max_request_rows:
            raise invalid(f"batch={batch}: at most {self._section.max_request_rows} rows in one request")
        observation = self.observation.read("observation", request.observation, batch)
        if self.remembers or request.state:
            observation |= self._read_state(request)
        return Question(
            observation=observation,
            rows=batch or 1,
            deterministic=request.deterministic,
            seed=request.seed if request.HasField("seed") else None,
            masks=self.action.read_masks(request.action_mask, batch),
            distribution=request.want_distribution,
            value=request.want_value,
            episode_id=request.episode_id,
            request_id=request.request_id,
        )

    def _read_state(self, request: pb.ActRequest) -> dict[str, Array]:
        """What the caller has kept; without it an episode begins."""
        if request.state and not self.remembers:
            raise invalid("state: this policy has no recurrent state; leave it out")
        if request.state and request.episode_id:
            raise invalid("state: the episode keeps it here; leave it out")
        if request.state:
            return self._state.read("state", request.state, request.batch)
        return {name: zeros(leaf, (request.batch or 1,)) for name, leaf in self._state_leaves}

    def check_call(self, policy: str, request_id: str) -> None:
        """Raise Refused unless the policy is served and the id may be remembered."""
        if policy not in ("", self._section.policy):
            raise invalid(f"policy={policy[:80]!r}: here {self._section.policy!r} is served")
        if len(request_id) > MAX_REQUEST_ID:
            raise invalid(f"request_id of {len(request_id)} characters: at most {MAX_REQUEST_ID}")

    async def answer(self, choice: Choice, question: Question, until_s: float) -> Answered:
        """An answer, or the fallback's; raises Refused where there is none in time."""
        asked = Asked(choice, question, until_s, time.perf_counter())
        if choice.loaded is None:
            return await self.fall_back(asked, None)
        future = self._batcher.ask(choice.loaded, question, until_s)
        try:
            answer = await future
        except Refused:
            raise
        except Exception as error:  # noqa: BLE001 - complained of there
            return await self.fall_back(asked, error)
        return self.answered(asked, answer)

    async def fall_back(self, asked: Asked, error: Exception | None) -> Answered:
        """The declared fallback's, since the chosen version failed with `error` or is none; raises Refused."""
        choice, not_finite = asked.choice, isinstance(error, NotFinite)
        if choice.loaded is not None and error is not None:
            self.complaints.failed(choice.loaded, asked.question, error)
        if self._section.fallback == "previous":
            former = self.shelf.former(choice.arm, choice.loaded)
            answer = None if former is None else await self._ask_former(former, asked)
            if answer is not None:
                return self._given(
                    choice.arm, asked.began_s, answer.ready, answer, "previous", not_finite=not_finite
                )
        name, action = self._drawn(asked.question.rows)
        return self._given(choice.arm, asked.began_s, action, None, name, not_finite=not_finite)

    async def _ask_former(self, former: Loaded, asked: Asked) -> Answer | None:
        """None when it cannot answer either."""
        future = self._batcher.ask(former, asked.question, asked.until_s)
        try:
            return await future
        except Refused:
            raise
        except Exception as error:  # noqa: BLE001 - complained of there
            self.complaints.failed(former, asked.question, error)
            return None

    def answered(self, asked: Asked, answer: Answer) -> Answered:
        """What the client gets of the version that was chosen."""
        choice = asked.choice
        if not choice.is_previous:
            if choice.arm is not Arm.PINNED:
                self.shelf.note_answered(choice.arm, answer.loaded)
            if choice.shadow is not None:
                self._compare(choice.shadow, asked, answer)
        name = "previous" if choice.is_previous else ""
        return self._given(choice.arm, asked.began_s, answer.ready, answer, name)

    def _given(
        self,
        arm: Arm,
        began_s: float,
        action: Mapping[str, Array] = _NOTHING,
        answer: Answer | None = None,
        fallback: str = "",
        *,
        not_finite: bool = False,
        reply: bytes = b"",
    ) -> Answered:
        seconds = time.perf_counter() - began_s
        metrics.ANSWER_SECONDS.observe(seconds)
        self._answers[arm, fallback].inc()
        return Answered(
            arm=arm,
            action=action,
            answer=answer,
            fallback=fallback,
            seconds=seconds,
            not_finite=not_finite,
            reply=reply,
        )

    def encode(self, request: pb.ActRequest, answered: Answered) -> bytes:
        """The bytes of `reply`."""
        answer = answered.answer
        if answer is None or answer.distribution is not None or answer.value is not None or self.remembers:
            return self.reply(request, answered).SerializeToString()
        who = answered_by(answer.loaded.version, answered.arm, answered.fallback)
        return self._encoder.encode(request, answered.action, answer, who)

    def reply(self, request: pb.ActRequest, answered: Answered) -> pb.ActReply:
        """The message of an answer."""
        answer, batch = answered.answer, request.batch
        reply = pb.ActReply(
            request_id=request.request_id,
            action=self.action.write(answered.action, batch),
            version=0 if answer is None else answer.loaded.version,
            arm=ARMS[answered.arm],
            fallback=FALLBACKS[answered.fallback],
        )
        if answer is not None:
            reply.log_prob.extend(answer.log_prob.tolist())
            if answer.distribution is not None:
                reply.distribution.extend(self.action.write_described(answer.distribution, batch))
            if answer.value is not None:
                reply.value.extend(answer.value.tolist())
        if self.remembers and not request.episode_id:
            # Where no policy answered nothing was seen: the caller goes on with what it has.
            kept = request.state if answer is None else self._state.write(answer.state, batch)
            reply.state.extend(kept)
        return reply

    def _drawn(self, rows: int) -> tuple[str, Mapping[str, Array]]:
        name = "uniform" if self._section.fallback == "previous" else self._section.fallback
        if name not in self._draws:
            text = "no version can answer, and serving.fallback=none"
            raise Refused(Refusal(reason=Reason.NOT_READY, detail=text, retry_after_ms=1000))
        return name, self._draws[name](rows)

    def _compare(self, shadow: Loaded, asked: Asked, answer: Answer) -> None:
        """Have another version answer as well, when there is time, and note what it says."""
        is_recorded = self._record is not None
        question = replace(asked.question, taken=answer.action, distribution=is_recorded, value=False)
        try:
            future = self._batcher.ask(shadow, question)
        except Refused:
            return  # there was no time
        future.add_done_callback(partial(self._note, asked, answer, shadow.version))

    def _note(self, asked: Asked, answer: Answer, shadow: int, done: "asyncio.Future[Answer]") -> None:
        if done.cancelled():
            return
        error = done.exception()
        agreement = 0.0 if error else float(np.exp(np.minimum(done.result().log_prob, 0.0)).mean())
        metrics.SHADOW_AGREEMENT.observe(agreement)
        if self._record is not None:
            self._record.note(asked.choice.arm, asked.question, answer, shadow, error or done.result())
