"""Agents that know OpenAI's API alone, by its unmodified client: answers, tools, streams, errors, rewards."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import openai
import pytest
from openai.types.chat.chat_completion_chunk import ChoiceDelta

from penstock.protocol.fragment import read_payload
from penstock.registry.records import Traffic
from penstock.registry.routing import Arms
from tests.support.language.text_stand import TOOLS, TextStand, agents_api, make_model, served_text

KEYLESS: Final = "none"
CHAT: Final = "chat/completions"
HOT: Final = b'{"model":"default","messages":[{"role":"user","content":"sum"}],"temperature":NaN}'
ASKED: Final[list[Any]] = [{"role": "user", "content": "sum"}]
IMAGE: Final = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
FORCED: Final = {"type": "function", "function": {"name": "add"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("text")


@pytest.fixture(scope="module")
def stand(folder: Path) -> Iterator[TextStand]:
    with served_text(make_model(folder / "model"), folder / "text.sock") as made:
        yield made


@pytest.fixture(scope="module")
def client(stand: TextStand, folder: Path) -> Iterator[Any]:
    with agents_api(folder / "text.sock") as address:
        yield openai.OpenAI(base_url=address, api_key=KEYLESS, max_retries=0)


SWITCHES: Final = (
    *("stream", "logprobs", "store"),
    *("penstock.show_thought", "penstock.learn", "penstock.regenerate"),
)


def _with(name: str, said: Any) -> bytes:
    *outer, inner = name.split(".")
    field: dict[str, Any] = {inner: said}
    return json.dumps(
        {"model": "default", "messages": ASKED} | ({outer[0]: field} if outer else field)
    ).encode()


def named(conversation: str, **extension: Any) -> dict[str, Any]:
    extra: dict[str, Any] = {"extra_headers": {"X-Conversation-Id": conversation}}
    return extra | ({"extra_body": {"penstock": extension}} if extension else {})


def whole(client: Any, messages: list[Any], conversation: str) -> Any:
    made = client.chat.completions.create(
        model="default", messages=messages, tools=list(TOOLS), **named(conversation)
    )
    return made.choices[0].message, made.model_extra["penstock"]


def streamed(client: Any, messages: list[Any], conversation: str) -> Any:
    extension = None
    with client.chat.completions.stream(
        model="default", messages=messages, tools=list(TOOLS), **named(conversation)
    ) as events:
        for one in events:
            if one.type == "chunk":
                extension = (one.chunk.model_extra or {}).get("penstock", extension)
        return events.get_final_completion().choices[0].message, extension


def put_together(client: Any, messages: list[Any], conversation: str) -> Any:
    delta, extension = ChoiceDelta(role="assistant", content="", tool_calls=[]), None
    parts = client.chat.completions.create(
        model="default",
        messages=messages,
        tools=list(TOOLS),
        stream=True,
        stream_options={"include_usage": True},
        **named(conversation),
    )
    for part in parts:
        for choice in part.choices:
            delta.content += choice.delta.content or ""
            delta.tool_calls += choice.delta.tool_calls or []
        extension = (part.model_extra or {}).get("penstock", extension)
    return delta, extension


def as_it_is(message: Any) -> Any:
    return message.model_dump()


def without_null(message: Any) -> Any:
    return message.model_dump(exclude_none=True)


def with_more(message: Any) -> Any:
    said = message.model_dump() | {"name": "agent", "reasoning": "why", "annotations": [], "parsed": None}
    for call in said["tool_calls"] or ():
        call |= {"index": None, "provider": "none"}
        call["function"] |= {"parsed_arguments": {"a": 1}}
    return said


def written_anew(message: Any) -> Any:
    said = message.model_dump()
    for call in said["tool_calls"] or ():
        arguments = json.loads(call["function"]["arguments"])
        call["function"]["arguments"] = json.dumps(arguments, separators=(",", ":"), indent=1)
    text: dict[str, Any] = {"type": "text", "text": said["content"] or "", "annotations": []}
    return said | {"content": [text | {"cache_control": None}]}


@pytest.mark.promise("unmodified-clients-openai-s", "unmodified-client-openai-s")
@pytest.mark.parametrize("sent_back", [as_it_is, without_null, with_more, written_anew])
@pytest.mark.parametrize("ask", [whole, streamed, put_together])
def test_a_conversation_with_two_tool_calls_is_learned_from(
    client: Any, stand: TextStand, ask: Any, sent_back: Any
) -> None:
    name, messages, ids = f"two-calls-{ask.__name__}-{sent_back.__name__}", list(ASKED), list[int]()
    for said in ("3", "sea"):
        answer, told = ask(client, messages, name)
        (call,) = answer.tool_calls
        messages.append(sent_back(answer))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
        ids += told["token_ids"][0]
    answer, told = ask(client, messages, name)
    assert answer.content == "done"
    assert (told["learned"], told["turn"], told["version"], told["arm"]) == (True, 2, 1, "latest")
    ids += told["token_ids"][0]
    reward = {"conversation_id": name, "reward": 1.0, "final": True}
    result: Any = client.post("/rewards", body=reward, cast_to=object)
    assert (result["total_return"], result["turns"], result["late"]) == (1.0, 3, False)
    (fragment,) = stand.fragments()
    assert fragment.header.weights[0].version == 1
    tensors = read_payload(fragment.header, fragment.payload)
    assert tensors["action"][tensors["valid"]].tolist() == ids
    assert tensors["reward"].sum() == 1.0


def test_n_answers_with_log_probabilities_and_usage(client: Any) -> None:
    made = client.chat.completions.create(
        model="default:latest", messages=ASKED, n=2, logprobs=True, max_tokens=3, stop="none"
    )
    assert [one.index for one in made.choices] == [0, 1]
    extra: Any = made.model_extra
    for choice, ids in zip(made.choices, extra["penstock"]["token_ids"], strict=True):
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert len(choice.logprobs.content) == len(ids)
        assert all(one.logprob <= 0 for one in choice.logprobs.content)
    assert made.usage is not None
    assert made.usage.completion_tokens == sum(map(len, extra["penstock"]["token_ids"]))
    assert made.usage.total_tokens == made.usage.prompt_tokens + made.usage.completion_tokens


def test_a_stream_that_is_closed_ends_its_answers(client: Any, stand: TextStand) -> None:
    with client.chat.completions.create(model="default", messages=ASKED, stream=True, max_tokens=40) as parts:
        next(iter(parts))
    assert client.chat.completions.create(model="default", messages=ASKED).choices


@pytest.mark.promise("label-operator-registry-model")
def test_a_version_answers_under_its_name(client: Any, stand: TextStand) -> None:
    arms = stand.versions.arms
    asked = {"messages": ASKED, "max_tokens": 1}
    with pytest.raises(openai.NotFoundError, match="there is none of that name"):
        client.chat.completions.create(model="default:v15", **asked)
    try:
        stand.versions.arms = Arms(
            traffic=Traffic(policy="default"),
            active=None,
            canary=None,
            pinned=frozenset({1}),
            labels={"v15": 1, "v16": 99},
        )
        made = client.chat.completions.create(model="default:v15", **asked)
        assert made.model_extra["penstock"]["version"] == 1
        assert made.system_fingerprint == "default:1"
        names = {one.id for one in client.models.list().data}
        assert ("default:v15" in names, "default:v16" in names) == (True, False)
        with pytest.raises(openai.NotFoundError, match="there is none of that name"):
            client.chat.completions.create(model="default:v16", **asked)
        with pytest.raises(openai.NotFoundError, match="there is none of that name"):
            client.chat.completions.create(model="other:v15", **asked)
    finally:
        stand.versions.arms = arms


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"temperature": 0.5}, "sampling"),
        ({"top_p": 0.9}, "sampling"),
        ({"seed": 3}, "sampling"),
        ({"logit_bias": {"9": 1}}, "sampling"),
        ({"presence_penalty": 0.5}, "sampling"),
        ({"frequency_penalty": 0.5}, "sampling"),
        ({"tool_choice": "required", "tools": list(TOOLS)}, "sampling"),
        ({"tool_choice": FORCED, "tools": list(TOOLS)}, "sampling"),
        ({"response_format": {"type": "json_object"}}, "sampling"),
        ({"extra_body": {"penstock": {"learn": False}}}, "unasked"),
        ({"extra_headers": {}}, "no conversation"),
        ({"model": "default:1"}, "no conversation"),
    ],
)
def test_answers_not_sampled_from_the_policy_are_not_learned_from(
    client: Any, fields: dict[str, Any], reason: str
) -> None:
    asked: dict[str, Any] = {"model": "default", "messages": ASKED, **named(f"c-{len(str(fields))}")} | fields
    made = client.chat.completions.create(**asked)
    extra: Any = made.model_extra
    assert (extra["penstock"]["learned"], extra["penstock"]["unlearned"]) == (False, reason)


@pytest.mark.parametrize("choice", ["none", "auto"])
def test_tool_choice_none_and_auto_are_learned_from(client: Any, choice: str) -> None:
    made = client.chat.completions.create(
        model="default", messages=ASKED, tools=list(TOOLS), tool_choice=choice, **named(f"choice-{choice}")
    )
    assert made.model_extra["penstock"]["learned"]


@pytest.mark.parametrize(
    ("fields", "status", "param", "message"),
    [
        ({"model": "other"}, 404, "model", "there is none of that name; use default"),
        ({"model": "default:canary"}, 404, "model", "no version is on it"),
        ({"model": "default:99"}, 404, "model", "its weights are not held"),
        ({"messages": []}, 400, "messages", "at least 1 item"),
        ({"messages": [{"role": "user", "content": "<eos>"}]}, 400, "messages[0].content", "control token"),
        (
            {"messages": [{"role": "user", "content": "sum " * 70}]},
            400,
            "messages",
            r"7\d tokens and an answer of up to 6 do not fit into 64",
        ),
        (
            {"messages": [*ASKED, {"role": "assistant", "content": "done"}]},
            400,
            "messages[1].role",
            "the last message must be of a user or a tool",
        ),
        (
            {"messages": [*ASKED, {"role": "tool", "tool_call_id": "call-9", "content": "3"}]},
            400,
            "messages[1].tool_call_id",
            "no call before has the id 'call-9'",
        ),
        ({"max_tokens": 0}, 400, "max_tokens", "greater than or equal to 1"),
        ({"temperature": -1}, 400, "temperature", "say 0 to 100"),
        ({"logit_bias": {"5000": 1}}, 400, "logit_bias", "the vocabulary has the token ids 0 to"),
        ({"top_logprobs": 5}, 400, "top_logprobs", "less than or equal to 0"),
        ({"tools": [{"type": "function"}]}, 400, "tools[0]", "write"),
        ({"tool_choice": "required"}, 400, "tool_choice", "there are no tools"),
        ({"extra_body": {"nonsense": 1}}, 400, "nonsense", "leave it out"),
        ({"logit_bias": {"-1": 1}}, 400, "logit_bias", "token ids are 0 to"),
        ({"messages": [{"role": "user", "content": None}]}, 400, "messages.0.content", "is null or left out"),
        ({"messages": [{"role": "user", "content": []}]}, 400, "messages.0.content", "has no parts"),
        ({"messages": IMAGE}, 400, "messages.0.content", "part 0 is of type 'image_url'"),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}, "tools": list(TOOLS)},
            400,
            "tool_choice",
            "Input should be",
        ),
        ({"model": "default:"}, 404, "model", "there is none of that name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "description": "<eos> <user>"}}]},
            400,
            "tools[0]",
            "which is a control token",
        ),
    ],
)
def test_errors_have_the_form_of_the_api_and_name_the_field(
    client: Any, fields: dict[str, Any], status: int, param: str, message: str
) -> None:
    with pytest.raises(openai.APIStatusError, match=message) as raised:
        client.chat.completions.create(**({"model": "default", "messages": ASKED} | fields))
    assert (raised.value.status_code, raised.value.param) == (status, param)


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        (
            CHAT,
            b'{"model":"default","messages":[{"role":"user","content":"\\ud83d"}]}',
            "messages[0]",
            "invalid_value",
        ),
        (CHAT, b"[" * 100_000, None, "invalid_json"),
        (CHAT, b"[1]", None, "invalid_value"),
        (CHAT, HOT, "temperature", "invalid_value"),
        ("rewards", b'{"conversation_id":"odd","reward":NaN}', "reward", "invalid_value"),
        ("rewards", b'{"conversation_id":"odd","reward":1e39}', "reward", "invalid_value"),
        ("rewards", b'{"conversation_id":"odd","reward":1,"turn":7}', "turn", "invalid_value"),
        ("rewards", b'{"conversation_id":"odd"}', "reward", None),
        ("rewards", b'{"conversation_id":"odd","final":"no"}', "final", "invalid_value"),
        *((CHAT, _with(name, said), name, "invalid_value") for name in SWITCHES for said in ("yes", 1)),
    ],
)
def test_bodies_that_no_client_would_send_are_refused_in_the_form_of_the_api(
    client: Any, path: str, body: bytes, param: str | None, code: str | None
) -> None:
    client.chat.completions.create(model="default", messages=ASKED, **named("odd"))
    made = httpx.post(f"{client.base_url}{path}", content=body, headers={"content-type": "application/json"})
    assert made.status_code == 400
    error = made.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)


LEGACY: Final = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}


def post(client: Any, path: str, body: dict[str, Any], kind: str = "application/json") -> tuple[int, Any]:
    content = json.dumps(body)
    made = httpx.post(f"{client.base_url}{path}", content=content, headers={"content-type": kind}, timeout=60)
    return made.status_code, made.json()


def test_what_is_null_is_left_out_and_seed_minus_one_is_none(client: Any) -> None:
    body = {"model": "default", "messages": ASKED, "seed": -1, "prediction": None, "audio": None, "n": None}
    metadata = {"metadata": {"conversation_id": "nulls"}, "penstock": None, "stream_options": None}
    for kind in ("Application/JSON", "application/json ; charset=utf-8"):
        status, made = post(client, CHAT, body | metadata, kind)
        assert (status, made["penstock"]["unlearned"]) == (200, None)
    assert (
        post(client, "rewards", {"conversation_id": "nulls", "reward": 1, "final": None, "id": None})[0]
        == 200
    )


def test_more_tokens_than_there_is_room_for_are_as_many_as_fit(client: Any) -> None:
    messages, name = list(ASKED), {"conversation_id": "roomy"}
    body = {"model": "default", "max_tokens": 100_000, "tools": list(TOOLS)}
    for turn in range(2):
        status, made = post(client, CHAT, body | {"messages": messages, "metadata": name})
        assert (status, made["penstock"]["turn"], made["penstock"]["cut"]) == (200, turn, None)
        (call,) = made["choices"][0]["message"]["tool_calls"]
        said = {"role": "tool", "tool_call_id": call["id"], "content": ("3", "sea")[turn]}
        messages += [made["choices"][0]["message"], said]
    status, made = post(client, CHAT, {"model": "default", "messages": ASKED, "max_tokens": 100_000})
    assert status == 200
    assert made["usage"]["total_tokens"] <= 64


def test_an_assistants_function_call_of_the_older_form_is_refused_by_name(client: Any) -> None:
    status, made = post(client, CHAT, {"model": "default", "messages": [*ASKED, LEGACY, *ASKED]})
    assert (status, made["error"]["param"]) == (400, "messages.1.function_call")
    assert "send `content` and `tool_calls`" in made["error"]["message"]


def test_of_several_answers_a_reward_says_which(client: Any, stand: TextStand) -> None:
    made = client.chat.completions.create(model="default", messages=ASKED, n=2, **named("several"))
    body = {"conversation_id": "several", "reward": 1.0, "final": True}
    status, error = post(client, "rewards", body)
    assert (status, error["error"]["param"], error["error"]["code"]) == (409, "choice", "conflict")
    assert post(client, "rewards", body | {"choice": 1})[0] == 200
    (fragment,) = stand.fragments()
    tensors = read_payload(fragment.header, fragment.payload)
    assert tensors["action"][tensors["valid"]].tolist() == made.model_extra["penstock"]["token_ids"][1]


def test_a_conversation_that_failed_or_has_no_reward_is_not_learned_from(
    client: Any, stand: TextStand
) -> None:
    for name in ("failed", "silent"):
        client.chat.completions.create(model="default", messages=ASKED, **named(name))
    assert post(client, "rewards", {"conversation_id": "failed", "reward": 1.0})[0] == 200
    failed = {"conversation_id": "failed", "failed": "the tool's server is down"}
    status, error = post(client, "rewards", failed | {"reward": 1.0})
    assert (status, error["error"]["param"]) == (400, "failed")
    for _ in range(2):
        status, made = post(client, "rewards", failed)
        assert (status, made["turns"], made["total_return"]) == (200, 1, 1.0)
    assert post(client, "rewards", {"conversation_id": "silent", "final": True})[0] == 200
    assert stand.fragments() == []


def test_the_reply_says_that_another_history_cut_the_column(client: Any) -> None:
    messages = list(ASKED)
    answer, told = whole(client, messages, "cut")
    assert told["cut"] is None
    edited = answer.model_dump() | {"tool_calls": None, "content": "other"}
    _, told = whole(client, [*messages, edited, *ASKED], "cut")
    assert (told["cut"], told["turn"]) == ("history", 1)


def test_a_repeated_end_gives_the_same_result(client: Any) -> None:
    client.chat.completions.create(model="default", messages=ASKED, **named("again"))
    body = {"conversation_id": "again", "reward": 0.5, "final": True}
    first = client.post("/rewards", body=body, cast_to=object)
    assert client.post("/rewards", body=body, cast_to=object) == first
    assert first["total_return"] == 0.5


def test_a_reward_for_an_unknown_or_ended_conversation_is_refused(client: Any) -> None:
    text = "^Error code: 404.*conversation_id='never': has begun no conversation"
    with pytest.raises(openai.NotFoundError, match=text) as raised:
        client.post("/rewards", body={"conversation_id": "never", "reward": 1.0}, cast_to=object)
    assert raised.value.param == "conversation_id"
    client.chat.completions.create(model="default", messages=ASKED, **named("over"))
    over = {"conversation_id": "over", "reward": 1.0, "final": True}
    client.post("/rewards", body=over, cast_to=object)
    with pytest.raises(openai.BadRequestError, match="came after the turn was sent"):
        client.post("/rewards", body=over | {"final": False}, cast_to=object)
    with pytest.raises(openai.NotFoundError, match=r"metadata\.conversation_id='over': it has ended"):
        client.chat.completions.create(model="default", messages=ASKED, **named("over"))


def test_a_reward_posted_twice_counts_once(client: Any) -> None:
    client.chat.completions.create(model="default", messages=ASKED, **named("twice"))
    for name, amount in (("first", 0.25), ("first", 0.25), ("second", 0.5)):
        body = {"conversation_id": "twice", "reward": amount, "id": name}
        client.post("/rewards", body=body, cast_to=object)
    over: Any = client.post("/rewards", body={"conversation_id": "twice", "final": True}, cast_to=object)
    assert over["total_return"] == 0.75
