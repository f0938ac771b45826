import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import httpx
import openai
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from penstock.actor.link.ack_journal import Run, SampleJournal, digest, read_samples, runs_of, sample_files
from penstock.config.settings import ConfigurationError
from penstock.launch.audit.books import SessionHistory
from penstock.protocol.refusal import Refused
from penstock.registry.records import Traffic
from penstock.registry.routing import Arms
from penstock.runtime import metrics
from penstock.v1 import text_pb2 as pb
from penstock.workloads.language.guard import Direction, Guard, Verdict
from penstock.workloads.language.prompt import Message
from penstock.workloads.language.serving.chat_api import ChatListener
from penstock.workloads.language.serving.text_answerer import AnswerGuard, AnswerText, as_message, open_guard
from penstock.workloads.language.settings import GuardSection
from penstock.workloads.plugin.serving import Weights
from tests.support.language.text_stand import (
    ADD,
    LOOKUP,
    TOKENIZER,
    TOOLS,
    Caller,
    TextStand,
    adapter,
    guard_of,
    make_model,
    running,
    tool,
    user,
)


async def test_a_shadow_of_a_text_server_is_reported_as_unsupported(dialogue: Path) -> None:
    stand = TextStand(dialogue)
    for version in (1, 2):
        stand.weights[version] = Weights(version, 1, adapter(dialogue, version))
    traffic = Traffic(policy="default", shadow=2)
    arms = Arms(traffic=traffic, active=1, canary=None, pinned=frozenset())
    assert await stand.versions.steer(arms) == ["shadow=2: a server of text asks none; set it to 0"]
    assert stand.engine.versions == [1]
    choice = stand.versions.choose("ada")
    assert (choice.loaded and choice.loaded.version, choice.shadow) == (1, None)


class Broken(Guard):
    def _checked(self, text: str, direction: object) -> None:  # type: ignore[override]
        raise RuntimeError("broken")


def blocked(direction: str) -> float:
    return float(metrics.TEXT_BLOCKED.labels("latest", direction, "rule:banned")._value.get())


async def test_questions_are_checked_before_a_version_answers(dialogue: Path) -> None:
    for guard, by in ((guard_of("sea"), "rule:banned"), (AnswerGuard(guard=Broken()), "error")):
        async with running(TextStand(dialogue, guard=guard)) as stand:
            before = blocked("input")
            with pytest.raises(Refused, match=rf"messages\[1\].content: blocked by {by}|blocked by {by}"):
                await stand.say("", user(), Message("user", "the sea"))
            assert blocked("input") - before == (by == "rule:banned")


async def test_a_blocked_answer_leaves_neither_text_nor_ids(dialogue: Path) -> None:
    async with running(TextStand(dialogue, guard=guard_of("add"))) as stand:
        before = blocked("output")
        reply, shown = await stand.stream(user())
        assert (reply.answers[0].finish, reply.unlearned) == ("content_filter", "fallback")
        assert (reply.version, reply.is_fallback) == (0, True)
        assert (reply.answers[0].message.content, reply.answers[0].message.tool_calls) == ("", ())
        assert "".join(shown) == ""
        assert blocked("output") - before == 2, "the fallback, which knows the same, was blocked too"
        request = pb.GenerateRequest(messages=[pb.TextMessage(role="user", content="sum")])
        said = (await stand.service.generate(request, Caller())).answers
        for one in said:
            if one.finish == pb.FINISH_CONTENT_FILTER:
                assert not one.token_ids
                assert not one.tokens
                assert not one.log_prob


async def test_parts_streamed_before_a_blocked_call_equal_the_final_message(dialogue: Path) -> None:
    async with running(TextStand(dialogue, guard=guard_of("add"))) as stand:
        reply, shown = await stand.stream(user(), begins_with="sum <tool_call>")
        assert reply.answers[0].is_blocked
        assert "".join(shown) == reply.answers[0].message.content == "sum"


class FirstBlocked(Guard):
    has_blocked = False

    def _checked(self, text: str, direction: Direction) -> Verdict:
        if direction is Direction.OUTPUT and text and not self.has_blocked:
            self.has_blocked = True
            return Verdict("rule:banned")
        return super()._checked(text, direction)


async def test_the_fallback_answers_where_the_guard_blocked_all_answers(dialogue: Path) -> None:
    guard = AnswerGuard(guard=FirstBlocked())
    async with running(TextStand(dialogue, guard=guard)) as stand:
        reply, _ = await stand.stream(user(), temperature=0.0)
        assert (reply.version, reply.is_fallback, reply.unlearned) == (0, True, "sampling")
        assert reply.answers[0].message.tool_calls[0].name == "add"
        assert not reply.answers[0].is_blocked


@pytest.mark.parametrize("penalty", [0.0, -0.5])
async def test_a_blocked_answer_is_a_negative_reward_only_where_that_is_said(
    dialogue: Path, penalty: float
) -> None:
    guard = guard_of("add", penalty)
    async with running(TextStand(dialogue, guard=guard, reward_window_s=0.0, fallback="none")) as stand:
        conversation = stand.start()
        reply = await stand.say(conversation, user())
        assert reply.answers[0].is_blocked
        assert stand.end(conversation, None) == (penalty, 1)
        assert reply.unlearned == ("" if penalty else "blocked")
        assert len(stand.fragments()) == (1 if penalty else 0)


def test_a_run_lists_its_guards(tmp_path: Path) -> None:
    assert open_guard(GuardSection()) is None
    rules = tmp_path / "rules.toml"
    rules.write_text("[[rule]]\nname = 'vault'\npattern = 'vault'\n")
    found = open_guard(GuardSection(guard_rules=str(rules)), penalty=-1.0)
    assert found is not None
    assert found.check_whole("the vault").by == "rule:vault"
    with pytest.raises(ConfigurationError, match="cannot be read"):
        open_guard(GuardSection(guard=True, guard_rules=str(tmp_path / "none.toml")))


CALL = f"<tool_call> {ADD} </tool_call>"


@pytest.mark.parametrize(
    ("written", "content", "calls"),
    [
        ("sum 3", "sum 3", 0),
        (CALL, "", 1),
        (f"sum 3 {CALL}", "sum 3", 1),
        (f"sum {CALL} done", "sum  done", 1),
        (f"sum {CALL} {CALL}", "sum", 2),
        (f"sum <tool_call> {LOOKUP}", f"sum <tool_call> {LOOKUP}", 0),
        (f"sum <tool_call> {LOOKUP} </tool_call>", f"sum <tool_call> {LOOKUP} </tool_call>", 0),
    ],
)
def test_streamed_parts_equal_the_final_message(written: str, content: str, calls: int) -> None:
    ids = TOKENIZER(written, add_special_tokens=False)["input_ids"]
    said, message = streamed(AnswerText(TOKENIZER, holds_calls=True), ids, TOOLS[:1])
    assert (said, message.content, len(message.tool_calls)) == (content, content, calls)


def streamed(
    text: AnswerText, ids: Sequence[int], tools: Sequence[dict[str, Any]] = ()
) -> tuple[str, Message]:
    parts = []
    for token in ids:
        text.add(token)
        parts.append(text.take_shown())
        if text.is_stopped:
            break
    message = as_message(text.text, tools, "call")
    return "".join([*parts, text.take_rest(message)]), message


def letters() -> Any:
    letters = [chr(one) for one in range(32, 127)]
    words = [*(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    model = models.BPE(
        vocab={word: number for number, word in enumerate(words)}, merges=[], byte_fallback=True
    )
    made = Tokenizer(model)
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize(
    ("stops", "written", "content"),
    [
        (("bc", "abq"), "xabq", "x"),
        (("abq", "bc"), "xabq", "x"),
        (("q", " <t"), "hi <tool_call>{}", "hi"),
        ((" <t", "q"), "hi <tool_call>{}", "hi"),
        (("a<tool_call>x",), "ba<tool_call>x", "b"),
        (("bcd", "cdx"), "abcdx", "a"),
        (("zz",), "az", "az"),
    ],
)
def test_no_part_of_a_stop_sequence_is_streamed(stops: tuple[str, ...], written: str, content: str) -> None:
    tokenizer = letters()
    for holds_calls in (False, True):
        text = AnswerText(tokenizer, stops=stops, holds_calls=holds_calls)
        said, message = streamed(text, tokenizer(written, add_special_tokens=False)["input_ids"])
        assert (said, message.content) == (content, content)


@pytest.mark.parametrize("stop", [">>>", "}x", "call>…", "<tool_call>x"])
def test_text_that_may_begin_a_stop_sequence_is_not_streamed(stop: str) -> None:
    tokenizer, written = letters(), f"ok {CALL}"
    text = AnswerText(tokenizer, stops=(stop,), holds_calls=True)
    said, message = streamed(text, tokenizer(written, add_special_tokens=False)["input_ids"], TOOLS)
    assert (said, message.content, len(message.tool_calls)) == ("ok", "ok", 1)


@pytest.mark.parametrize("written", ["a€b", "€", "🌊", "héé", "x€"])
def test_characters_of_several_bytes_stream_as_they_are_in_the_message(written: str) -> None:
    tokenizer = letters()
    ids = tokenizer(written, add_special_tokens=False)["input_ids"]
    for count in range(1, len(ids) + 1):
        said, message = streamed(AnswerText(tokenizer), ids[:count])
        assert said == message.content
    assert said == written


def test_bytes_that_are_no_text_stream_as_they_are_in_the_message() -> None:
    tokenizer = letters()
    ids = [tokenizer.convert_tokens_to_ids(token) for token in ("h", "<0x41>", "<0xE2>")]
    said, message = streamed(AnswerText(tokenizer), ids)
    assert said == message.content


def test_a_token_that_ends_an_answer_has_no_text() -> None:
    tokenizer = letters()
    text = AnswerText(tokenizer, ends=[end := tokenizer.convert_tokens_to_ids("#")])
    said, message = streamed(text, [*tokenizer.convert_tokens_to_ids(["o", "k"]), end])
    assert (said, message.content, text.tokens) == ("ok", "ok", ["o", "k", ""])


@pytest.mark.parametrize("character", ["é", "€", "🙂"])
def test_the_texts_of_tokens_together_are_the_answer(character: str) -> None:
    tokenizer = letters()
    words = ["h", *(f"<0x{byte:02X}>" for byte in character.encode()), "i"]
    text = AnswerText(tokenizer)
    streamed(text, tokenizer.convert_tokens_to_ids(words))
    assert text.tokens == ["h", *[""] * (len(words) - 3), character, "i"]


@pytest.mark.parametrize("argument", [r'"\ud800"', "NaN", "Infinity", "1e999"])
def test_invalid_text_or_json_is_no_tool_call(argument: str) -> None:
    written = f'<tool_call> {{"name":"add","arguments":{{"a":{argument}}}}} </tool_call>'
    assert as_message(written, TOOLS, "call") == Message("assistant", written)


ASKED: Final[list[Any]] = [{"role": "user", "content": "sum"}]


async def test_a_server_of_text_answers_openais_api_itself(tmp_path: Path) -> None:
    async with running(TextStand(make_model(tmp_path / "model"))) as stand:
        listener = ChatListener("127.0.0.1:0", stand.service.chat_api)
        serving = asyncio.create_task(listener.serve())
        async with openai.AsyncOpenAI(base_url=f"{listener.url}/v1", api_key="none", max_retries=0) as client:
            completions: Any = client.chat.completions
            made = await completions.create(
                model="default", messages=ASKED, extra_headers={"X-Conversation-Id": "a"}
            )
            assert (made.model, made.penstock["learned"], made.penstock["turn"]) == ("default", True, 0)
            parts = [
                one async for one in await completions.create(model="default:1", messages=ASKED, stream=True)
            ]
            text = "".join(choice.delta.content or "" for part in parts for choice in part.choices)
            assert text == made.choices[0].message.content
            assert [one.id async for one in client.models.list()] == [
                "default",
                "default:latest",
                "default:1",
            ]
            with pytest.raises(openai.NotFoundError, match="there is none of that name; use default"):
                await completions.create(model="other", messages=ASKED)
            body = {"conversation_id": "a", "reward": 1.0, "final": True}
            result: Any = await client.post("/rewards", body=body, cast_to=object)
            assert (result["total_return"], result["turns"]) == (1.0, 1)
        async with httpx.AsyncClient() as plain:
            elsewhere = await plain.get(f"{listener.url}/v1/models", headers={"Host": "elsewhere.example"})
            assert (elsewhere.status_code, elsewhere.json()["error"]["code"]) == (421, "wrong_host")
        await listener.finish()
        await serving
        assert len(stand.fragments()) == 1


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "10.0.0.1:80", "nowhere", "unix:/tmp/socket"])
async def test_an_address_beyond_this_machine_is_refused(listen: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^serving\.http_listen={listen}: "):
        ChatListener(listen, None)  # type: ignore[arg-type]


async def test_a_server_without_what_http_needs_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "penstock.gateway.http_server", raising=False)
    with pytest.raises(ConfigurationError, match=r"there is no uvicorn here: install penstock-rl\[gateway\]"):
        ChatListener("127.0.0.1:0", None)  # type: ignore[arg-type]


@pytest.mark.promise("token-trained-conversations-sampled")
async def test_an_answer_is_recorded_before_it_is_sent_and_equals_its_column(
    stand: TextStand, tmp_path: Path
) -> None:
    assert stand.experience is not None
    journal = SampleJournal(tmp_path, "text", "server", stand.conversations.episodes.server)
    stand.experience._journal = journal
    (path,) = (place := sample_files([tmp_path]))
    conversation = stand.start()
    first = await stand.say(conversation, user(), count=2)
    (line,) = read_samples(path)
    assert line is not None
    assert line.runs == tuple(Run(1, digest(one.ids)) for one in first.answers)
    assert line.conversation == conversation.rpartition("-")[0]
    await stand.publish(2)
    answer = first.answers[1].message
    second = await stand.say(conversation, user(), answer, tool("3", answer.tool_calls[0]))
    stand.end(conversation)
    (fragment,) = stand.fragments()
    runs = [Run(1, digest(first.answers[1].ids)), Run(2, digest(second.answers[0].ids))]
    assert runs_of(fragment) == runs
    sent = list(read_samples(place[0]))[-1]
    assert sent is not None
    assert sent.runs == tuple(runs)
    assert sent.sha256
    stand.conversations.close()


async def test_a_conversation_of_older_weights_may_end_after_one_of_newer(stand: TextStand) -> None:
    first, history = stand.start("first"), SessionHistory(session=1)
    await stand.say(first, user())
    await stand.publish(2)
    second = stand.start("second")
    await stand.say(second, user())
    for conversation in (second, first):
        stand.end(conversation)
    third = stand.start("third")
    await stand.say(third, user())
    stand.end(third)
    fragments = stand.fragments()
    assert [one.header.oldest_version for one in fragments] == [2, 1, 2]
    for sequence, one in enumerate(fragments, 1):
        slots = [(slot.slot_id, slot.episode_id, slot.first_step) for slot in one.header.slots]
        weights = [(span.version, span.update) for span in one.header.weights]
        assert list(history.follow(sequence, slots, weights)) == []
