"""Asks the chosen version, and answers with the declared fallback where it cannot answer.

    choice ─► ask (one forward pass for many) ─► Answered ─► the shadow is asked afterwards, if there is one
                  └─ cannot answer ─► fall back: the version before it, else the declared action

Questions come in as arrays and leave as arrays: what a message looks like is known to `codec` alone.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from penstock.actor.serving.inference.batcher import Batcher
from penstock.actor.serving.inference.forward_pass import Answer, Loaded, NotFinite, Question
from penstock.actor.serving.versions.fallback import FALLBACKS, Fallback
from penstock.actor.serving.versions.loaded_versions import Choice, LoadedVersions
from penstock.actor.serving.versions.shadow import Shadow
from penstock.protocol.refusal import Refused
from penstock.protocol.tensor import Array
from penstock.registry.routing import Arm
from penstock.runtime import metrics


@dataclass(slots=True, kw_only=True)
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


@dataclass(slots=True)
class Asked:
    """A question, the version that was chosen for it, and when it was asked.

    began_s: when it was asked, in seconds of `time.perf_counter`.
    """

    choice: Choice
    question: Question
    until_s: float
    began_s: float


OnAnswer = Callable[[Asked, Answer | Exception | None], None]
"""Takes the answer of the chosen version or its error; None where no version could be asked.
"""


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
        """on_failure: takes each version that could not answer, the question, and the error.

        on_unanswered: told of what is refused because no version could answer and no fallback is declared.
        """
        self._loaded_versions, self._batcher, self._fallback, self._shadow = (
            loaded_versions,
            batcher,
            fallback,
            shadow,
        )
        self._on_failure, self._on_unanswered = on_failure, on_unanswered
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
        """Ask the chosen version without waiting; raises Refused (OVERLOADED).

        on_answer: called once, with the forward pass or before this returns.
        is_gone: whether the answer is no longer wanted; then `on_answer` is not called.
        """
        asked = Asked(choice, question, until_s, time.perf_counter())
        if choice.loaded is None:
            on_answer(asked, None)
        else:
            self._batcher.put(choice.loaded, question, until_s, partial(on_answer, asked), is_gone)

    async def answer(self, choice: Choice, question: Question, until_s: float) -> Answered:
        """The answer of the chosen version, or the fallback's; raises Refused where there is none in time."""
        asked = Asked(choice, question, until_s, time.perf_counter())
        if choice.loaded is None:
            return await self.fall_back(asked, None)
        future = self._batcher.ask(choice.loaded, question, until_s)
        try:
            answer = await future
        except Refused:
            raise
        except Exception as error:  # noqa: BLE001 - handed to `on_failure`
            return await self.fall_back(asked, error)
        return self.complete(asked, answer)

    def complete(self, asked: Asked, answer: Answer) -> Answered:
        """Turn the answer of the chosen version into the client's, and have the shadow asked afterwards."""
        choice = asked.choice
        if not choice.is_previous:
            if choice.arm is not Arm.PINNED:
                self._loaded_versions.note_answered(choice.arm, answer.loaded)
            if choice.shadow is not None:
                self._shadow.compare(choice.shadow, choice.arm, asked.question, answer)
        if not choice.is_previous:
            return self._answered(asked, answer.ready, answer, "")
        is_to_blame = choice.arm is Arm.CANARY
        return self._answered(asked, answer.ready, answer, "previous", is_to_blame=is_to_blame)

    async def fall_back(self, asked: Asked, error: Exception | None) -> Answered:
        """Return the fallback's answer, because the chosen version failed with `error`.

        error: None when no version could be asked.
        Raises Refused where the configuration names no fallback, or the time is over.
        """
        choice, not_finite = asked.choice, isinstance(error, NotFinite)
        if choice.loaded is not None and error is not None:
            self._on_failure(choice.loaded, asked.question, error)
        answer = await self._of_another(asked)
        is_to_blame = choice.arm is Arm.CANARY and answer is not None
        if answer is not None and self._fallback.is_previous:
            return self._answered(
                asked, answer.ready, answer, "previous", not_finite=not_finite, is_to_blame=is_to_blame
            )
        try:
            name, action = self._fallback.draw(asked.question.rows)
        except Refused:
            self._on_unanswered(
                Answered(
                    arm=choice.arm,
                    action={},
                    answer=None,
                    fallback="none",
                    not_finite=not_finite,
                    is_to_blame=is_to_blame,
                )
            )
            raise
        return self._answered(asked, action, None, name, not_finite=not_finite, is_to_blame=is_to_blame)

    async def _of_another(self, asked: Asked) -> Answer | None:
        """The answer of a version that could stand in; None where none can answer this question.

        Whether the active version can also says whether a canary is to blame for that it cannot.
        """
        choice = asked.choice
        others = (
            [self._loaded_versions.former(choice.arm, choice.loaded)] if self._fallback.is_previous else []
        )
        if choice.arm is Arm.CANARY:
            others.append(self._loaded_versions.active)
        for other in others:
            answer = None if other in (None, choice.loaded) else await self._ask_other(other, asked)
            if answer is not None:
                return answer
        return None

    async def _ask_other(self, other: Loaded, asked: Asked) -> Answer | None:
        """Its answer; None when it cannot answer either."""
        future = self._batcher.ask(other, asked.question, asked.until_s)
        try:
            return await future
        except Refused:
            raise
        except Exception as error:  # noqa: BLE001 - handed to `on_failure`
            self._on_failure(other, asked.question, error)
            return None

    def _answered(
        self,
        asked: Asked,
        action: Mapping[str, Array],
        answer: Answer | None,
        fallback: str,
        *,
        not_finite: bool = False,
        is_to_blame: bool = False,
    ) -> Answered:
        arm, seconds = asked.choice.arm, time.perf_counter() - asked.began_s
        metrics.ANSWER_SECONDS.observe(seconds)
        self._count[arm, fallback]()
        return Answered(
            arm=arm,
            action=action,
            answer=answer,
            fallback=fallback,
            not_finite=not_finite,
            is_to_blame=is_to_blame,
        )
