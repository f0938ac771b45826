"""Whatever an answer says and however it is cut into pieces, nothing that is blocked leaves."""

import itertools
import re

from hypothesis import example, given
from hypothesis import strategies as st

from penstock.workloads.language.guard import MAX_HELD, Direction, Guard, HeldText, Rule

PHRASE = "open the vault"
GUARD = Guard((Rule("vault", re.compile(r"open\W+the\W+vault")), Rule("end", re.compile(r"never\. say"))))
WORDS = st.sampled_from(
    ["open", "the", "vault", PHRASE, "OPEN", "\uff56\uff41\uff55\uff4c\uff54", "never", "say", "a", "b"]
)
BORDERS = st.sampled_from([" ", ". ", "! ", "\n", "... ", ".", "\u200b", '." '])


@st.composite
def answers(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A text with words of the rules, and a way to cut it."""
    parts = draw(st.lists(st.tuples(WORDS, BORDERS), max_size=30))
    text = draw(st.text(max_size=20)) + "".join(word + border for word, border in parts)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=10)))
    edges = [0, *cuts, len(text)]
    return text, [text[start:end] for start, end in itertools.pairwise(edges)]


@example(("never. say it", ["never. ", "say it"]))  # a rule that spans sentences which leave one by one
@given(answers())
def test_what_has_left_would_pass_at_every_moment(answer: tuple[str, list[str]]) -> None:
    text, pieces = answer
    held, left = HeldText(GUARD), ""
    for piece in [*pieces, None]:
        was_blocked = held.verdict.is_blocked
        more = held.finish() if piece is None else held.feed(piece)
        assert not (was_blocked and more)
        left += more
        assert text.startswith(left)
        assert not GUARD.check(left, Direction.OUTPUT).is_blocked
    if not GUARD.check(text, Direction.OUTPUT).is_blocked and not held.verdict.is_blocked:
        assert left == text
    else:
        assert held.verdict.is_blocked
        assert left != text


@given(st.text(max_size=50), st.integers(1, 9))
def test_a_guard_that_fails_lets_nothing_leave(text: str, size: int) -> None:
    class Broken(Guard):
        def _checked(self, text: str, direction: Direction) -> None:  # type: ignore[override]
            raise RuntimeError("broken")

    held = HeldText(Broken())
    left = "".join(held.feed(text[at : at + size]) for at in range(0, len(text), size)) + held.finish()
    assert left == ""
    assert held.verdict.by == "error"


def test_what_has_no_sentences_is_not_held_for_ever() -> None:
    held = HeldText(GUARD)
    assert held.feed("a" * (MAX_HELD - 1)) == ""
    assert held.feed("aa") == "a" * (MAX_HELD + 1)
