"""Calls of TextService as data: the request, and how its reply is read; no connection, no event loop."""

import json
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypedDict

from penstock.client.calls import Call, Started, arm_of, checked_text, copied, new_request_id, versions_of
from penstock.client.errors import (
    BadReply,
    DeadlinePassed,
    InvalidRequest,
    NotAllowed,
    Overloaded,
    PolicyError,
    Unreachable,
)
from penstock.client.values import Arm, Fallback, ServedVersion
from penstock.v1 import policy_pb2
from penstock.v1 import text_pb2 as pb

DEADLINE_S: Final = 60.0
"""Of every call, in seconds."""
_WHOLE: Final = 1.0
"""Share of the deadline that one attempt at an answer may take."""

# ---- Arguments and results of the text client as frozen dataclasses and typed dictionaries.

Messages = Sequence[Mapping[str, Any]]
"""All messages of a conversation, oldest first."""


class TextOptions(TypedDict, total=False):
    """Options of answers to messages; without them the policy answers as it was trained."""

    tools: Sequence[Mapping[str, Any]]
    """Tools that an answer may call, each {"type": "function", "function": {…}}."""
    max_tokens: int
    """Most tokens of an answer; 0: as many as the run allows."""
    temperature: float | None
    """Sampling temperature; 0: the most likely tokens. Answers at another than 1 are not learned from."""
    top_p: float | None
    """Sample from the most likely tokens of this share. Answers at another than 1 are not learned from."""
    seed: int | None
    """Seed of the sampling; such an answer is not learned from."""
    stop: Sequence[str]
    """Texts that end an answer."""
    count: int
    """Number of answers, sampled independently."""
    learned: bool
    """False: answer, and learn nothing from it."""
    regenerate: bool
    """In a conversation: sample another answer to the same messages."""
    begins_with: str
    """Text with which the answer begins; such an answer is not learned from."""
    logit_bias: Mapping[int, float]
    """Added to the logits of token ids; such an answer is not learned from."""
    presence_penalty: float
    frequency_penalty: float
    thought_tokens: int | None
    """Most tokens of the thought before each answer; None: as many as the run allows; 0: no thought."""
    show_thought: bool
    """Return the text of the thought, and not only its length and duration."""


class SingleOptions(TextOptions, total=False):
    """Options of answers without a conversation."""

    client_key: str
    """Key of the client: the same key gets the same arm."""
    version: int
    """Exactly this version; 0: that of the arm."""
    arm: Arm | None
    """Follow this arm; None: that of the client key."""


class ConversationOptions(TypedDict, total=False):
    """Options of a conversation that begins."""

    name: str
    """Continue the conversation of this name, if it exists."""
    learned: bool
    """False: the system does not learn from it."""
    arm: Arm | None
    """Follow this arm; None: the one of the client key."""
    must_exist: bool
    """Raise EpisodeUnknown for an unknown name, instead of beginning a conversation."""
    opinions: bool
    """Its rewards are a person's opinions of answers: the share of all that was liked judges a canary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thought:
    """A thought before an answer.

    tokens: their number, the end token included. milliseconds: its duration. is_cut: the budget ended it.
    text, token_ids: its content; "" and () where it is hidden.
    """

    tokens: int
    milliseconds: float
    is_cut: bool
    text: str
    token_ids: tuple[int, ...]

    @property
    def is_shown(self) -> bool:
        """Whether the content is shown."""
        return bool(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextAnswer:
    """An answer.

    message: the assistant's, to be sent back unchanged. token_ids: as they were sampled. log_prob: of each
    token, under the version at temperature 1. tokens: text of each. finish: "stop", "length", "tool_calls" or
    "content_filter": the guard withheld part of the text and all token ids. thought: before the answer, or
    None.
    """

    message: dict[str, Any]
    token_ids: tuple[int, ...]
    log_prob: tuple[float, ...]
    tokens: tuple[str, ...]
    finish: str
    thought: Thought | None = None

    @property
    def text(self) -> str:
        """The text of the message."""
        return str(self.message["content"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Answers to messages; fields as in `GenerateReply`. cut: "" where the column before goes on.

    fallback: None where the arm's own version answered. unlearned: why the system does not learn from it; ""
    where it does.
    """

    answers: tuple[TextAnswer, ...]
    version: int
    arm: Arm | None
    fallback: Fallback | None
    conversation_id: str
    turn: int
    learned: bool
    unlearned: str
    prompt_tokens: int
    request_id: str
    cut: str = ""

    @property
    def text(self) -> str:
        """The text of the first answer."""
        return self.answers[0].text


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPart:
    """The next piece of text of an answer. index: of the answer, from 0."""

    index: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationResult:
    """The result of a conversation that has ended: the sum of its rewards so far, and its turns."""

    total_return: float
    turns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDescription:
    """A served policy of text; fields as in `DescribeTextReply`."""

    run: str
    policy: str
    versions: tuple[ServedVersion, ...]
    """Oldest first."""
    max_tokens: int
    answer_tokens: int
    max_conversations: int
    reward_window_ms: int
    conversation_timeout_ms: int
    server: str
    learns: bool
    labels: Mapping[str, int]
    """Versions with a label of an operator, by label."""
    thought_tokens: int = 0
    """Most tokens of a thought before an answer; 0: the policy does not think."""


_FINISHES: Final = {
    pb.FINISH_LENGTH: "length",
    pb.FINISH_TOOL_CALLS: "tool_calls",
    pb.FINISH_CONTENT_FILTER: "content_filter",
}

_CONVERTED: Final = ("tools", "stop", "learned", "begins_with", "logit_bias")
_PLAIN: Final = tuple(name for name in TextOptions.__annotations__ if name not in _CONVERTED)
"""Options that are fields of the request under the same names."""
_MOST_ID: Final = 2**32 - 1


def describe(policy: str) -> Call[TextDescription]:
    return Call("Describe", pb.DescribeTextRequest(policy=policy), _description)


def start(policy: str, client_key: str, options: ConversationOptions) -> Call[Started]:
    """Return the call StartConversation; raises TypeError for an unknown option."""
    _check_names(options, ConversationOptions, "a conversation")
    request = pb.StartConversationRequest(
        policy=policy,
        request_id=checked_text("name", options.get("name", "")) or new_request_id(),
        client_key=checked_text("client_key", client_key),
        not_learned=not options.get("learned", True),
        arm=_number(options.get("arm")),
        must_exist=options.get("must_exist", False),
        opinions=options.get("opinions", False),
    )
    return Call(
        "StartConversation",
        request,
        lambda reply: Started(reply.conversation_id, arm_of(reply.arm), reply.learned),
    )


def generate(policy: str, messages: Messages, options: SingleOptions) -> Call[Generation]:
    """Return the call Generate without a conversation.

    Raises ValueError for messages of another form, and TypeError for an unknown option.
    """
    _check_names(options, SingleOptions)
    request = _request(policy, messages, options)
    request.client_key = checked_text("client_key", options.get("client_key", ""))
    request.version = options.get("version", 0)
    request.arm = _number(options.get("arm"))
    return Call("Generate", request, _generation, _WHOLE)


def turn(conversation_id: str, messages: Messages, options: TextOptions) -> Call[Generation]:
    """Return the call Generate of a conversation; raises as `generate`."""
    _check_names(options, TextOptions)
    request = _request("", messages, options)
    request.conversation_id = conversation_id
    return Call("Generate", request, _generation, _WHOLE)


def reward(
    conversation_id: str,
    rewards: Iterable[tuple[int | None, float]],
    request_id: str = "",
    asked: bool = False,
    choice: int | None = None,
) -> Call[int]:
    """Return the call Reward, whose result is the number of rewards that arrived too late.

    rewards: (index of the turn, amount); index None: the newest turn. request_id: a repetition under the same
    one adds nothing; "": a new one. asked: the person was prompted for these opinions. choice: which of
    several answers to the same messages.
    """
    turns = [pb.TurnReward(turn=number, amount=amount) for number, amount in rewards]
    request = pb.TurnRewardsRequest(
        conversation_id=conversation_id,
        request_id=checked_text("request_id", request_id) or new_request_id(),
        rewards=turns,
        asked=asked,
        choice=choice,
    )
    return Call("Reward", request, lambda reply: int(reply.late))


def end(
    conversation_id: str, amount: float | None, truncated: bool, request_id: str = ""
) -> Call[ConversationResult]:
    """Return the call EndConversation. amount: reward of the newest turn."""
    ending = policy_pb2.ENDING_TRUNCATED if truncated else policy_pb2.ENDING_TERMINATED
    return _end(conversation_id, ending, amount, request_id)


def abandon(conversation_id: str) -> Call[ConversationResult]:
    """Return the call EndConversation for a conversation whose newest turns have no known outcome."""
    return _end(conversation_id, policy_pb2.ENDING_ABANDONED, None, "")


def _end(
    conversation_id: str, ending: "policy_pb2.Ending.ValueType", amount: float | None, request_id: str
) -> Call[ConversationResult]:
    request = pb.EndConversationRequest(
        conversation_id=conversation_id,
        request_id=checked_text("request_id", request_id) or new_request_id(),
        ending=ending,
        reward=amount,
    )
    return Call("EndConversation", request, partial(copied, ConversationResult))


def _generation(reply: pb.GenerateReply) -> Generation:
    return copied(
        Generation,
        reply,
        answers=tuple(map(_answer, reply.answers)),
        arm=arm_of(reply.arm),
        fallback=Fallback(reply.fallback) if reply.fallback else None,
    )


def _request(policy: str, messages: Messages, options: TextOptions) -> pb.GenerateRequest:
    request = pb.GenerateRequest(
        policy=policy,
        request_id=new_request_id(),
        messages=[_message(index, one) for index, one in enumerate(messages)],
        tools=[json.dumps(tool) for tool in options.get("tools", ())],
        stop=[checked_text("stop", one) for one in options.get("stop", ())],
        count=1,
        not_learned=not options.get("learned", True),
        begins_with=checked_text("begins_with", options.get("begins_with", "")),
        logit_bias=checked_biases(options.get("logit_bias", {})),
    )
    for name in _PLAIN:
        value = options.get(name)
        try:
            if value is not None:
                setattr(request, name, value)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}={value!r}: {error}") from error
    return request


def _check_names(
    options: Mapping[str, object], known: type[TextOptions | ConversationOptions], what: str = "an answer"
) -> None:
    """Raise TypeError for an unknown option, such as a misspelt one, which would have no effect."""
    names = known.__annotations__
    strange = sorted(options.keys() - names.keys())
    if strange:
        raise TypeError(f"{strange[0]}: no option of {what}; there are {', '.join(names)}")


def checked_biases(given: Mapping[int, float]) -> Mapping[int, float]:
    """Return biases whose keys a message can hold; raises ValueError for others."""
    for token in given:
        if not 0 <= token <= _MOST_ID:
            raise ValueError(f"logit_bias={token}: token ids are 0 to {_MOST_ID}")
    return given


def _message(index: int, message: Mapping[str, Any]) -> pb.TextMessage:
    content = message.get("content")
    try:
        return pb.TextMessage(
            role=message["role"],
            content="" if content is None else content,
            tool_calls=[_call(one) for one in message.get("tool_calls") or ()],
            tool_call_id=message.get("tool_call_id") or "",
        )
    except (KeyError, TypeError, UnicodeEncodeError) as error:
        raise ValueError(
            f"messages[{index}]: {error}; write texts under `role` and `content`, of tool calls under `id`, "
            "`function.name` and `function.arguments`"
        ) from error


def _call(call: Mapping[str, Any]) -> pb.ToolCall:
    function = call["function"]
    return pb.ToolCall(id=call["id"], name=function["name"], arguments=function["arguments"])


def _answer(answer: pb.TextAnswer) -> TextAnswer:
    message: dict[str, Any] = {"role": answer.message.role, "content": answer.message.content}
    if answer.message.tool_calls:
        message["tool_calls"] = [
            {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}}
            for one in answer.message.tool_calls
        ]
    return TextAnswer(
        message=message,
        token_ids=tuple(answer.token_ids),
        log_prob=tuple(answer.log_prob),
        tokens=tuple(answer.tokens),
        finish=_FINISHES.get(answer.finish, "stop"),
        thought=copied(Thought, answer.thought, token_ids=tuple(answer.thought.token_ids))
        if answer.HasField("thought")
        else None,
    )


def _description(reply: pb.DescribeTextReply) -> TextDescription:
    return copied(TextDescription, reply, versions=versions_of(reply.versions), labels=dict(reply.labels))


def _number(arm: Arm | None) -> "policy_pb2.Arm.ValueType":
    return policy_pb2.Arm.ValueType(0 if arm is None else arm.value)


# ---- Requests to OpenAI's API and answers, between a server of text and what speaks HTTP before it.

INVALID: Final = "invalid_request_error"
JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"


HttpRequest = pb.HttpRequest


@dataclass(frozen=True, slots=True)
class HttpReply:
    """An answer whose body arrives in parts, which can be read once."""

    status: int
    headers: Mapping[str, str]
    parts: AsyncGenerator[bytes, None]

    async def whole(self) -> bytes:
        return b"".join([part async for part in self.parts])


def json_reply(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> HttpReply:
    body = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return HttpReply(status, {"content-type": JSON, **(headers or {})}, once(body.encode()))


def event(content: Any) -> str:
    """Return a server-sent event."""
    return f"data: {json.dumps(content, separators=(',', ':'))}\n\n"


class ChatError(Exception):
    """An error in the form of OpenAI's API.

    param: the field of the request. retry_s: seconds after which to try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = INVALID,
        retry_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {} if retry_s is None else {"retry-after": str(max(1, round(retry_s)))}
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def reply(self) -> HttpReply:
        return json_reply(self.body, self.status, self.headers)


_KINDS: Final[dict[type[PolicyError], tuple[int, str, str]]] = {
    InvalidRequest: (400, INVALID, "invalid_value"),
    NotAllowed: (401, "authentication_error", "not_allowed"),
    Overloaded: (429, "rate_limit_error", "overloaded"),
    BadReply: (502, "server_error", "bad_reply"),
    Unreachable: (503, "server_error", "unreachable"),
    DeadlinePassed: (504, "server_error", "deadline"),
}


def unanswered(error: PolicyError, remedy: str) -> ChatError:
    """Return the HTTP error for a failed call of the policy server. remedy: appended to its message."""
    status, kind, code = _KINDS.get(type(error), (502, "server_error", "refused"))
    return ChatError(status, f"{error}{remedy}", code=code, kind=kind)


def unknown_model(policy: str, others: Sequence[str] = ()) -> ChatError:
    """Return the error for an unknown model name. policy, others: the names of the policies."""
    alternatives = f"; the same of {', '.join(others)}" if others else ""
    return ChatError(
        404,
        f"model: there is none of that name; use {policy}, {policy}:latest, {policy}:active, "
        f"{policy}:canary, a version as {policy}:40, or its label{alternatives}",
        param="model",
        code="model_not_found",
    )


async def once(body: bytes) -> AsyncGenerator[bytes, None]:
    """Yield a whole body as the only part of an answer."""
    yield body
