"""The guard of a server of text: messages are checked before anything is answered, answers before they leave.

    messages ─► checked ─► the engine ─► text is held until its sentence was checked ─► the caller
        └─► refused                          └─► blocked: what was checked before stays, all else is dropped

It stands outside the policy: no training moves it, and what cannot be checked does not pass. A blocked answer
is not learned from, unless it is to be a negative reward. What is blocked is counted by arm and by rule.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.protocol.refusal import invalid
from penstock.registry.routing import Arm
from penstock.runtime import metrics
from penstock.workloads.language.guard.guard_rules import BUILT_IN, Direction, Verdict
from penstock.workloads.language.guard.text_classifier import Guard, HeldText, read_guard_files
from penstock.workloads.language.prompt import Message


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

    def held(self) -> HeldText:
        """Return what holds an answer back until it was checked."""
        return HeldText(self.guard)

    def check_whole(self, text: str) -> Verdict:
        """Return what the guard says of an answer with everything in it, such as calls of tools."""
        return self.guard.check(text, Direction.OUTPUT)

    def count(self, verdict: Verdict, direction: Direction, arm: Arm) -> None:
        """Count what was blocked."""
        metrics.TEXT_BLOCKED.labels(arm=arm, direction=direction, by=verdict.by).inc()


def open_guard(
    *, is_on: bool, rules: str = "", classifier: str = "", penalty: float = 0.0
) -> AnswerGuard | None:
    """Return the guard that a run asks for; None where it asks for none.

    is_on: with the rules that are built in. rules, classifier: files; each turns it on, too. Raises
    ConfigurationError for a file that cannot be used.
    """
    if not (is_on or rules or classifier):
        return None
    own, judge = read_guard_files(rules, classifier)
    return AnswerGuard(guard=Guard((*BUILT_IN, *own), judge), penalty=penalty)
