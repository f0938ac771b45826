"""Whatever a model says and whatever is banned, no blocked text leaves a server, streamed or whole."""

import asyncio
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.v1 import text_pb2 as pb
from penstock.workloads.language.guard import Direction, Guard, Rule, fold
from penstock.workloads.language.serving.text_answerer import AnswerGuard
from tests.support.language.text_stand import WORDS, TextStand, make_model, running

pytestmark = pytest.mark.timeout(300)
_SAFE = [word for word in WORDS if word.isalnum()]


@pytest.fixture(scope="module")
def dialogue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model's folder."""
    return make_model(tmp_path_factory.mktemp("dialogue") / "model")


class Caller:
    """Waits for a minute."""

    def time_remaining(self) -> float:
        """Seconds."""
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


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    banned=st.lists(st.sampled_from(_SAFE), min_size=1, max_size=3, unique=True),
    seeds=st.lists(st.integers(0, 2**31), min_size=2, max_size=4),
)
def test_no_blocked_text_leaves(dialogue: Path, banned: list[str], seeds: list[int]) -> None:
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
