"""Answers of all clients in windows: who asks for much is not the canary's fault, and none is the last."""

import pytest

from penstock.actor.serving.batcher import Answer, Answered, Pass
from penstock.actor.serving.release import MAX_WINDOWS, WINDOW_ANSWERS, WINDOW_S, AnswerWindows
from penstock.registry.routing import Arm
from tests.support.serving.server_parts import loaded_of, specification

SLOW_S = 0.05
LOADED = loaded_of(specification())


def answered(rows: int = 1, seconds: float = 0.001) -> Answered:
    """An answer that comes from a pass of so many rows."""
    answer = Answer(LOADED, {}, {}, None, passed=Pass(rows, seconds))  # type: ignore[arg-type]  # not read
    return Answered(arm=Arm.CANARY, action={}, answer=answer, fallback="")


def failed(*, is_to_blame: bool = True) -> Answered:
    """One that the canary could not give."""
    return Answered(arm=Arm.CANARY, action={}, answer=None, fallback="uniform", is_to_blame=is_to_blame)


def tell(windows: AnswerWindows, canary: list[Answered], active: list[Answered]) -> None:
    """All of them, in the same window."""
    for one in active:
        windows.answered(one, canary=False, now_s=0.0)
    for one in canary:
        windows.answered(one, canary=True, now_s=0.0)


def slower(canary: list[Answered], active: list[Answered]) -> float | None:
    """By how much the canary is."""
    windows = AnswerWindows(SLOW_S, 0.0)
    tell(windows, canary, active)
    (window,) = windows.take(WINDOW_S)
    return window.slower


def test_a_window_counts_what_the_canary_could_not_answer() -> None:
    windows = AnswerWindows(SLOW_S, 0.0)
    tell(windows, [answered(), failed(), failed(is_to_blame=False)], [answered()] * 10)
    assert windows.take(WINDOW_S - 0.1) == []
    (window,) = windows.take(WINDOW_S)
    assert (window.answers, window.failed, window.not_finite) == (3, 1, 0)
    assert windows.take(2 * WINDOW_S) == []


@pytest.mark.parametrize(
    ("canary", "active", "expected"),
    [
        ([answered(1, 5.0)] * 4, [answered(1)] * 9, 1.0),
        ([answered(1, 5.0), answered(1)], [answered(1)] * 9, 0.5),
        ([answered(1, 5.0)] * 4, [answered(1, 5.0)] * 9, 0.0),
        # Its clients ask for much, and much takes long on either arm.
        ([answered(512, 5.0)] * 4, [answered(1)] * 9 + [answered(512, 5.0)], 0.0),
        ([answered(512, 5.0)] * 4, [answered(1)] * 9, None),
        # A larger pass that is quick says that a smaller one should be.
        ([answered(4, 5.0)] * 4, [answered(64)] * 9, 1.0),
        ([failed()] * 4, [answered(1)] * 9, None),
    ],
)
def test_slow_passes_are_compared_with_those_of_their_size_or_larger(
    canary: list[Answered], active: list[Answered], expected: float | None
) -> None:
    assert slower(canary, active) == expected


def test_windows_that_are_not_taken_are_bounded() -> None:
    windows = AnswerWindows(SLOW_S, 0.0)
    for _ in range((MAX_WINDOWS + 3) * WINDOW_ANSWERS):
        windows.answered(answered(), canary=True, now_s=0.0)
    closed = windows.take(0.0)
    assert [window.answers for window in closed] == [WINDOW_ANSWERS] * MAX_WINDOWS
    windows.answered(answered(), canary=True, now_s=0.0)
    assert [window.answers for window in windows.take(WINDOW_S)] == [1]
