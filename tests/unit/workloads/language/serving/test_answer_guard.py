"""A guard around a server of text: what is asked, what leaves, what is learned from."""

import re
from pathlib import Path

import pytest

from penstock.config.settings import ConfigurationError
from penstock.protocol.refusal import Refused
from penstock.runtime import metrics
from penstock.v1 import text_pb2 as pb
from penstock.workloads.language.guard import Direction, Guard, Rule, Verdict
from penstock.workloads.language.prompt import Message
from penstock.workloads.language.serving.text_answerer import AnswerGuard, open_guard
from penstock.workloads.language.serving.text_request import TextRequest
from penstock.workloads.language.settings import GuardSection
from tests.support.language.text_stand import FAR, TOOLS, TextStand, running

SUM = Message("user", "sum")


def guard_of(pattern: str, penalty: float = 0.0) -> AnswerGuard:
    """One rule."""
    return AnswerGuard(guard=Guard((Rule("banned", re.compile(pattern)),)), penalty=penalty)


class Broken(Guard):
    """Cannot check anything."""

    def _checked(self, text: str, direction: object) -> None:  # type: ignore[override]
        raise RuntimeError("broken")


def blocked(direction: str) -> float:
    """So often it was blocked."""
    return float(metrics.TEXT_BLOCKED.labels("latest", direction, "rule:banned")._value.get())


async def test_what_is_asked_is_checked_before_anything_answers(dialogue: Path) -> None:
    for guard, by in ((guard_of("sea"), "rule:banned"), (AnswerGuard(guard=Broken()), "error")):
        async with running(TextStand(dialogue, guard=guard)) as stand:
            before = blocked("input")
            with pytest.raises(Refused, match=rf"messages\[1\].content: blocked by {by}|blocked by {by}"):
                await stand.say("", SUM, Message("user", "the sea"))
            assert blocked("input") - before == (by == "rule:banned")


async def test_a_blocked_answer_leaves_neither_text_nor_ids(dialogue: Path) -> None:
    async with running(TextStand(dialogue, guard=guard_of("add"))) as stand:
        before, shown = blocked("output"), list[str]()
        ask = TextRequest(messages=(SUM,), tools=TOOLS, conversation_id=stand.start())
        reply = await stand.conversations.generate(ask, FAR, lambda _, part: shown.append(part))
        assert (reply.answers[0].finish, reply.unlearned) == ("content_filter", "fallback")
        assert (reply.version, reply.is_fallback) == (0, True)
        assert (reply.answers[0].message.content, reply.answers[0].message.tool_calls) == ("", ())
        assert "".join(shown) == ""
        assert blocked("output") - before == 2, "the fallback, which knows the same, was blocked too"
        request = pb.GenerateRequest(messages=[pb.TextMessage(role="user", content="sum")])

        class Caller:
            def time_remaining(self) -> float:
                return 60.0

        said = (await stand.service.generate(request, Caller())).answers
        for one in said:
            if one.finish == pb.FINISH_CONTENT_FILTER:
                assert not one.token_ids
                assert not one.tokens
                assert not one.log_prob


async def test_what_streams_before_a_blocked_call_is_what_the_message_says(dialogue: Path) -> None:
    async with running(TextStand(dialogue, guard=guard_of("add"))) as stand:
        shown = list[str]()
        ask = TextRequest(
            messages=(SUM,), tools=TOOLS, conversation_id=stand.start(), begins_with="sum <tool_call>"
        )
        reply = await stand.conversations.generate(ask, FAR, lambda _, part: shown.append(part))
        assert reply.answers[0].is_blocked
        assert "".join(shown) == reply.answers[0].message.content == "sum"


class FirstBlocked(Guard):
    """Blocks the first answer that it sees."""

    has_blocked = False

    def _checked(self, text: str, direction: Direction) -> Verdict:
        if direction is Direction.OUTPUT and text and not self.has_blocked:
            self.has_blocked = True
            return Verdict("rule:banned")
        return super()._checked(text, direction)


async def test_the_fallback_answers_for_a_version_of_which_nothing_is_left(dialogue: Path) -> None:
    guard = AnswerGuard(guard=FirstBlocked())
    async with running(TextStand(dialogue, guard=guard)) as stand:
        shown = list[str]()
        ask = TextRequest(messages=(SUM,), tools=TOOLS, conversation_id=stand.start(), temperature=0.0)
        reply = await stand.conversations.generate(ask, FAR, lambda _, part: shown.append(part))
        assert (reply.version, reply.is_fallback, reply.unlearned) == (0, True, "sampling")
        assert reply.answers[0].message.tool_calls[0].name == "add"
        assert not reply.answers[0].is_blocked


@pytest.mark.parametrize("penalty", [0.0, -0.5])
async def test_it_is_a_negative_reward_only_where_that_is_said(dialogue: Path, penalty: float) -> None:
    guard = guard_of("add", penalty)
    async with running(TextStand(dialogue, guard=guard, reward_window_s=0.0, fallback="none")) as stand:
        conversation = stand.start()
        reply = await stand.say(conversation, SUM)
        assert reply.answers[0].is_blocked
        total, turns = stand.conversations.end(
            conversation, "end", terminated=True, abandoned=False, reward=None
        )
        assert (total, turns) == (penalty, 1)
        assert reply.unlearned == ("" if penalty else "blocked")
        assert len(stand.fragments()) == (1 if penalty else 0)


def test_a_run_says_what_guards_it(tmp_path: Path) -> None:
    assert open_guard(GuardSection()) is None
    rules = tmp_path / "rules.toml"
    rules.write_text("[[rule]]\nname = 'vault'\npattern = 'vault'\n")
    found = open_guard(GuardSection(guard_rules=str(rules)), penalty=-1.0)
    assert found is not None
    assert found.check_whole("the vault").by == "rule:vault"
    with pytest.raises(ConfigurationError, match="cannot be read"):
        open_guard(GuardSection(guard=True, guard_rules=str(tmp_path / "none.toml")))
