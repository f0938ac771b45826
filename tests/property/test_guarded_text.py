import asyncio
import itertools
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from penstock.v1 import text_pb2 as pb
from penstock.workloads.language.guard import MAX_HELD, Direction, Guard, HeldText, Rule, fold
from penstock.workloads.language.serving.text_answerer import AnswerGuard
from tests.support.language.text_stand import WORDS, TextStand, make_model, running

_SAFE = [word for word in WORDS if word.isalnum()]


@pytest.fixture(scope="module")
def dialogue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("dialogue") / "model")


class Caller:
    def time_remaining(self) -> float:
        return 60.0


async def answered(base: Path, guard: Guard, seeds: list[int]) -> list[tuple[str, pb.GenerateReply]]:
    """What was streamed, and the reply, of answers that are drawn wildly."""
    found = []
    async with running(TextStand(base, guard=AnswerGuard(guard=guard))) as stand:
        for seed in seeds:
            request = pb.GenerateRequest(
                messages=[pb.TextMessage(role="user", content="other")],
                temperature=50.0,
                seed=seed,
                max_tokens=12,
            )
            streamed, reply = "", pb.GenerateReply()
            async for chunk in stand.service.generate_stream(request, Caller()):
                streamed += chunk.text
                if chunk.HasField("reply"):
                    reply = chunk.reply
            found.append((streamed, reply))
    return found


@pytest.mark.timeout(300)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    banned=st.lists(st.sampled_from(_SAFE), min_size=1, max_size=3, unique=True),
    seeds=st.lists(st.integers(0, 2**31), min_size=2, max_size=4),
)
def test_no_blocked_text_is_sent(dialogue: Path, banned: list[str], seeds: list[int]) -> None:
    rule = Rule(
        "banned", re.compile("|".join(map(re.escape, map(fold, banned)))), frozenset({Direction.OUTPUT})
    )
    for streamed, reply in asyncio.run(answered(dialogue, Guard((rule,)), seeds)):
        assert not reply.refusal.detail
        for one in reply.answers:
            assert streamed == one.message.content
            assert not rule.pattern.search(fold(streamed))
            assert not rule.pattern.search(fold(" ".join(one.tokens)))
            if one.finish == pb.FINISH_CONTENT_FILTER:
                assert not one.token_ids


PHRASE = "open the vault"
GUARD = Guard((Rule("vault", re.compile(r"open\W+the\W+vault")), Rule("end", re.compile(r"never\. say"))))
TEXT_WORDS = st.sampled_from(
    ["open", "the", "vault", PHRASE, "OPEN", "\uff56\uff41\uff55\uff4c\uff54", "never", "say", "a", "b"]
)
BORDERS = st.sampled_from([" ", ". ", "! ", "\n", "... ", ".", "\u200b", '." '])


@st.composite
def answers(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A text with words of the rules, and a way to cut it."""
    parts = draw(st.lists(st.tuples(TEXT_WORDS, BORDERS), max_size=30))
    text = draw(st.text(max_size=20)) + "".join(word + border for word, border in parts)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=10)))
    edges = [0, *cuts, len(text)]
    return text, [text[start:end] for start, end in itertools.pairwise(edges)]


@example(("never. say it", ["never. ", "say it"]))  # a rule that spans sentences which leave one by one
@given(answers())
def test_text_that_was_sent_would_pass_at_every_moment(answer: tuple[str, list[str]]) -> None:
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
def test_a_failing_guard_blocks_everything(text: str, size: int) -> None:
    class Broken(Guard):
        def _checked(self, text: str, direction: Direction) -> None:  # type: ignore[override]
            raise RuntimeError("broken")

    held = HeldText(Broken())
    left = "".join(held.feed(text[at : at + size]) for at in range(0, len(text), size)) + held.finish()
    assert left == ""
    assert held.verdict.by == "error"


def test_text_without_sentences_is_not_held_for_ever() -> None:
    held = HeldText(GUARD)
    assert held.feed("a" * (MAX_HELD - 1)) == ""
    assert held.feed("aa") == "a" * (MAX_HELD + 1)
