"""Requests, answers and refusals in the form of OpenAI's API."""

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from penstock.client.calls import checked_text
from penstock.client.text_calls import INVALID, ChatError, checked_biases, event, unknown_model
from penstock.gateway.frame.requests import NUMERIC, Number
from penstock.protocol.refusal import Reason, Refused
from penstock.registry.routing import Arm
from penstock.workloads.language.prompt import Message, ToolCall, plain
from penstock.workloads.language.serving.text_answerer import OPENING
from penstock.workloads.language.serving.text_request import (
    MAX_COUNT,
    OtherAnswer,
    TextAnswer,
    TextReply,
    TextRequest,
    check_counts,
    checked_tool,
)

_ARMS: Final = {arm.value: arm for arm in (Arm.LATEST, Arm.ACTIVE, Arm.CANARY)}
NAME_FORM: Final = r"[\x21-\x7e]{1,128}"
ConversationName = Annotated[str, Field(pattern=f"^{NAME_FORM}$")]
"""A caller's name for a conversation: printable characters without blanks."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        """Leave out what is null, as a client does that writes each field of its own form."""
        return {k: v for k, v in values.items() if v is not None} if isinstance(values, dict) else values


class _SentBack(BaseModel):
    """A part of a message; clients may add fields, such as `index` of a streamed tool call."""

    model_config = ConfigDict(extra="ignore")


class _TextPart(_SentBack):
    type: Literal["text"]
    text: str


class _Function(_SentBack):
    name: str
    arguments: str


class _ToolCall(_SentBack):
    id: str
    type: Literal["function"] = "function"
    function: _Function


class ChatMessage(_SentBack):
    """A message. Its content is text, or parts of text; images and sound are refused."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | list[_TextPart] | None, Field(validate_default=True)] = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: Any = None
    audio: Any = None
    refusal: Any = None

    @field_validator("function_call", "audio", "refusal")
    @classmethod
    def _is_unsaid(cls, given: Any) -> None:
        """Refuse what would be lost in silence."""
        if given:
            raise PydanticCustomError("unread", "is not read here: send `content` and `tool_calls`")

    @field_validator("content", mode="before")
    @classmethod
    def _is_text(cls, content: Any, info: ValidationInfo) -> Any:
        if content is None and info.data.get("role") != "assistant":
            raise PydanticCustomError("no_content", "is null or left out: send a text, which may be empty")
        if isinstance(content, list) and not content:
            raise PydanticCustomError("no_content", "has no parts: send a text, which may be empty")
        for index, part in enumerate(content if isinstance(content, list) else ()):
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind != "text":
                text = "part {index} is of type {kind}, and text alone is read here: leave it out"
                raise PydanticCustomError("no_text", text, {"index": index, "kind": repr(kind[:40])})
        return content

    def message(self, index: int) -> Message:
        """Return it as the model reads it; raises ChatError for text that is not valid Unicode."""
        text = self.content or ""
        if not isinstance(text, str):
            text = "".join(part.text for part in text)
        calls = [ToolCall(one.id, one.function.name, one.function.arguments) for one in self.tool_calls or ()]
        made = Message(
            "system" if self.role == "developer" else self.role, text, tuple(calls), self.tool_call_id or ""
        )
        try:
            for _, one in made.texts:
                one.encode()
        except UnicodeEncodeError as error:
            place = f"messages[{index}]"
            raise ChatError(400, f"{place}: {error}", param=place, code="invalid_value") from error
        return made


class _StreamOptions(_Part):
    include_usage: StrictBool = False
    include_obfuscation: StrictBool = False


class _Format(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class _NamedFunction(_Part):
    name: str


class _NamedTool(_Part):
    type: Literal["function"]
    function: _NamedFunction


class Extension(_Part):
    """Fields beyond the API: `extra_body={"penstock": {…}}` of its client."""

    regenerate: StrictBool = False
    """In a conversation: answer the same messages once more."""
    learn: StrictBool = True
    """False: answer, and learn nothing from it."""
    thought_tokens: Annotated[int, Field(ge=0, lt=2**31, strict=True)] | None = None
    """Most tokens of the thought before each answer; None: the run's limit; 0: no thought."""
    show_thought: StrictBool = False
    """Tell what was thought."""


class ChatRequest(_Part):
    """The body of POST /v1/chat/completions."""

    model: str
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    stream: StrictBool | None = None
    stream_options: _StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=16), NUMERIC] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | _NamedTool | None = None
    parallel_tool_calls: StrictBool | None = None
    stop: str | list[str] | None = None
    seed: Annotated[int, Field(ge=-1, lt=2**64), NUMERIC] | None = None
    """-1 is none, as for other servers."""
    max_tokens: Annotated[int, Field(ge=1, lt=2**31), NUMERIC] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31), NUMERIC] | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=0), NUMERIC] | None = None
    """Only 0: the server returns the log-probabilities of the drawn tokens alone."""
    logit_bias: dict[int, Number] | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    response_format: _Format | None = None
    user: Annotated[str, Field(max_length=256)] | None = None
    metadata: dict[str, str] | None = None
    store: StrictBool | None = None
    penstock: Extension = Extension()

    def text_request(self, request_id: str, most_tokens: int) -> TextRequest:
        """Return the request as data; raises ChatError, Refused and ValueError.

        most_tokens: that fit; each message and each tool call takes at least one.
        """
        self._check()
        tools = [] if self.tool_choice == "none" else self.tools or []
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        check_counts(
            most_tokens,
            messages=len(self.messages),
            calls=sum(len(one.tool_calls or ()) for one in self.messages),
            tools=len(tools),
            characters=sum(len(json.dumps(tool)) for tool in tools),
            stops=len(stop),
            biased=len(self.logit_bias or ()),
        )
        return TextRequest(
            messages=tuple(one.message(index) for index, one in enumerate(self.messages)),
            tools=tuple(checked_tool(index, tool) for index, tool in enumerate(tools)),
            request_id=request_id,
            max_tokens=self.max_completion_tokens or self.max_tokens or 0,
            may_be_shorter=True,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=None if self.seed == -1 else self.seed,
            stop=tuple(checked_text("stop", one) for one in stop),
            count=self.n or 1,
            not_learned=not self.penstock.learn,
            regenerate=self.penstock.regenerate,
            begins_with=checked_text("begins_with", self._begins_with()),
            logit_bias=checked_biases(self.logit_bias or {}),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            thought_tokens=self.penstock.thought_tokens,
            show_thought=self.penstock.show_thought,
        )

    def conversation(self, header: str | None) -> str:
        """Return the caller's name for its conversation; "": it gives none. Raises ChatError.

        header: X-Conversation-Id, which takes precedence over `metadata.conversation_id`.
        """
        name = header or (self.metadata or {}).get("conversation_id", "")
        if name and not re.fullmatch(NAME_FORM, name):
            place = "X-Conversation-Id" if header else "metadata.conversation_id"
            raise ChatError(400, f"{place}: use 1 to 128 printable characters without blanks", param=place)
        return name

    def _check(self) -> None:
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise ChatError(400, "tool_choice: there are no tools to choose from", param="tool_choice")
        schema = self.response_format.json_schema if self.response_format else None
        if schema and schema.get("strict"):
            raise ChatError(
                400,
                "response_format.json_schema.strict: answers are not held to a schema here: leave it out",
                param="response_format.json_schema.strict",
            )

    def _begins_with(self) -> str:
        """Return the beginning of the answer that `tool_choice` or `response_format` calls for."""
        if isinstance(self.tool_choice, _NamedTool):
            name = self.tool_choice.function.name
            functions = [tool.get("function") for tool in self.tools or ()]
            if name not in [one.get("name") for one in functions if isinstance(one, Mapping)]:
                raise ChatError(400, f"tool_choice: no tool is named {name!r}", param="tool_choice")
            return f'{OPENING}\n{{"name": "{name}", "arguments": '
        if self.tool_choice == "required":
            return f"{OPENING}\n"
        is_text = self.response_format is None or self.response_format.type == "text"
        return "" if is_text else "{"


class RewardRequest(_Part):
    """The body of POST /v1/rewards: a reward for a turn of a conversation, and whether it has ended.

    conversation_id: the caller's name for it. reward: of `turn`, from 0; without `turn`: of the newest.
    choice: which of the answers to these messages, where there are several. final: the conversation has
    ended. failed: why it failed, so that nothing of it is learned from. id: a reward is added once under it.
    user, model: as in the requests of the conversation; no model: that of the first.
    """

    conversation_id: ConversationName
    reward: Number | None = None
    turn: Annotated[int, Field(ge=0, lt=2**31), NUMERIC] | None = None
    choice: Annotated[int, Field(ge=0, lt=MAX_COUNT), NUMERIC] | None = None
    final: StrictBool = False
    failed: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    id: Annotated[str, Field(max_length=128)] = ""
    user: Annotated[str, Field(max_length=256)] = ""
    model: Annotated[str, Field(max_length=256)] | None = None


def model_of(
    name: str, policy: str, labels: Mapping[str, int], others: Sequence[str] = ()
) -> tuple[Arm | None, int]:
    """Return the arm and the version of a model's name: POLICY, POLICY:latest, POLICY:40, POLICY:LABEL.

    policy: the caller's name for the served policy. labels: versions by label. others: further names, for the
    error. Raises ChatError 404 for any other name.
    """
    given, colon, which = name.partition(":")
    if given == policy and not colon:
        return None, 0
    if given == policy and which in _ARMS:
        return _ARMS[which], 0
    if given == policy and which.isascii() and which.isdigit() and 0 < int(which) < 2**53:
        return None, int(which)
    if given == policy and which in labels:
        return None, labels[which]
    raise unknown_model(policy, others)


# ---- Answers and their parts.


class Envelope:
    """Writes a reply as a completion, or as events of a stream. model: its name in the request."""

    def __init__(self, model: str, name: str) -> None:
        self._model, self._id, self._created = model, f"chatcmpl-{name}", int(time.time())

    def completion(self, given: TextReply, *, logprobs: bool) -> dict[str, Any]:
        choices = [
            _choice(index, answer, logprobs=logprobs) | {"message": _message(answer)}
            for index, answer in enumerate(_visible(given))
        ]
        return self._answered("chat.completion", given) | {
            "choices": choices,
            "usage": usage(given),
            "penstock": extension(given),
        }

    def part(self, index: int, delta: dict[str, Any]) -> str:
        choice = {"index": index, "delta": delta, "finish_reason": None, "logprobs": None}
        return event(self._head("chat.completion.chunk") | {"choices": [choice]})

    def last_parts(self, given: TextReply, *, logprobs: bool, with_usage: bool) -> Iterator[str]:
        """Yield events: the tool calls and the end of each answer, then the tokens that were used."""
        for index, answer in enumerate(_visible(given)):
            calls = [{"index": place} | call for place, call in enumerate(_calls(answer))]
            if calls:
                yield self.part(index, {"tool_calls": calls})
            choice = _choice(index, answer, logprobs=logprobs) | {"delta": {}}
            last = {"choices": [choice], "penstock": extension(given)}
            yield event(self._answered("chat.completion.chunk", given) | last)
        if with_usage:
            yield event(self._head("chat.completion.chunk") | {"choices": [], "usage": usage(given)})
        yield "data: [DONE]\n\n"

    def _answered(self, kind: str, given: TextReply) -> dict[str, Any]:
        # The model name of this version. Tracers of agents record the field as
        # gen_ai.openai.response.system_fingerprint (OpenTelemetry's conventions for OpenAI).
        policy = self._model.partition(":")[0]
        return self._head(kind) | {"system_fingerprint": f"{policy}:{given.version}"}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}


def usage(given: TextReply) -> dict[str, Any]:
    thoughts = [answer.thought.tokens for answer in given.answers if answer.thought is not None]
    written = sum(len(answer.ids) for answer in _visible(given)) + sum(thoughts)
    counted: dict[str, Any] = {
        "prompt_tokens": given.prompt_tokens,
        "completion_tokens": written,
        "total_tokens": given.prompt_tokens + written,
    }
    if thoughts:
        counted["completion_tokens_details"] = {"reasoning_tokens": sum(thoughts)}
    return counted


def extension(given: TextReply) -> dict[str, Any]:
    return {
        "conversation_id": given.conversation_id or None,
        "turn": given.turn if given.conversation_id else None,
        "version": given.version,
        "arm": given.arm.value,
        "fallback": "adapter_off" if given.is_fallback else None,
        "learned": not given.unlearned,
        "unlearned": given.unlearned or None,
        "cut": given.cut or None,
        "token_ids": [answer.ids for answer in _visible(given)],
        "thoughts": [_thought(answer) for answer in given.answers],
    }


def models(
    run: str, policy: str, served: Mapping[int, Sequence[Arm]], labels: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Return the models. policy: the caller's name for it. served: versions with their arms."""
    arms = {arm.value for of in served.values() for arm in of}
    names = [policy, *(f"{policy}:{one}" for one in (*sorted(arms), *served, *labels))]
    return [{"id": name, "object": "model", "created": 0, "owned_by": run} for name in names]


def _choice(index: int, answer: TextAnswer, *, logprobs: bool) -> dict[str, Any]:
    shown = _logprobs(answer) if logprobs else None
    return {"index": index, "finish_reason": answer.finish, "logprobs": shown}


def _visible(given: TextReply) -> list[TextAnswer]:
    return [answer.visible() for answer in given.answers]


def _message(answer: TextAnswer) -> dict[str, Any]:
    calls = _calls(answer)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": answer.message.content or (None if calls else ""),
    }
    return message | ({"tool_calls": calls} if calls else {})


def _thought(answer: TextAnswer) -> dict[str, Any] | None:
    thought = answer.thought
    if thought is None:
        return None
    fields = {"tokens": thought.tokens, "milliseconds": thought.milliseconds, "is_cut": thought.is_cut}
    return fields | ({"text": thought.text, "token_ids": thought.ids} if thought.ids else {})


def _calls(answer: TextAnswer) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = plain((answer.message,))[0].get("tool_calls", [])
    return calls


def _logprobs(answer: TextAnswer) -> dict[str, Any]:
    content = [
        {"token": text, "logprob": number, "bytes": list(text.encode()), "top_logprobs": []}
        for text, number in zip(answer.tokens, answer.log_prob, strict=True)
    ]
    return {"content": content, "refusal": None}


# ---- Refusals and malformed bodies as errors of the API.

_LOST: Final = "conversation_not_found"
_KINDS: Final = {
    Reason.INVALID: (400, INVALID, "invalid_value"),
    Reason.UNKNOWN_VERSION: (404, INVALID, "model_not_found"),
    Reason.EPISODE_UNKNOWN: (404, INVALID, _LOST),
    Reason.EPISODE_ELSEWHERE: (404, INVALID, _LOST),
    Reason.OVERLOADED: (429, "rate_limit_error", "overloaded"),
    Reason.NOT_READY: (503, "server_error", "not_ready"),
    Reason.DEADLINE: (504, "server_error", "deadline"),
}
_FIELD: Final = re.compile(r"(?:([a-z_]+\[\d+\](?:\.[a-z_]+)*)[ :=]|([a-z_]+(?:\.[a-z_]+)*)[=:\[])", re.ASCII)
_NAMES: Final = {
    "count": "n",
    "episode_id": "metadata.conversation_id",
    "conversation_id": "metadata.conversation_id",
    "begins_with": "tool_choice",
    "thought_tokens": "penstock.thought_tokens",
    "arm": "model",
    "version": "model",
}
"""Names that the API has for fields of a request for text."""
_OF_REWARDS: Final = {
    "episode_id": "conversation_id",
    "request_id": "conversation_id",
    "rewards.turn": "turn",
}
"""Names that it has for fields of a reward."""


def refusal_error(error: Refused, *, conversation: str = "", is_reward: bool = False) -> ChatError:
    """Return a refusal as an error. conversation: the caller's name for it. is_reward: it posted a reward."""
    refusal = error.refusal
    status, kind, code = _KINDS.get(refusal.reason, (502, "server_error", "refused"))
    if isinstance(error, OtherAnswer):
        status, code = 409, "conflict"
    detail = refusal.detail
    field = _field(detail) if status < 500 else None
    names = _OF_REWARDS if is_reward else _NAMES
    param = None if field is None else names.get(field, field)
    if conversation and code == _LOST:
        param = "conversation_id" if is_reward else _NAMES["conversation_id"]
        detail = f"{param}={conversation!r}: {detail.partition(': ')[2]}"
    elif field is not None and param is not None:
        detail = param + detail.removeprefix(field)
    retry_s = refusal.retry_after_ms / 1000 if status == 429 else None
    return ChatError(status, detail, param=param, code=code, kind=kind, retry_s=retry_s)


def value_error(error: ValueError) -> ChatError:
    return ChatError(400, str(error), param=_field(str(error)), code="invalid_value")


def _field(detail: str) -> str | None:
    found = _FIELD.match(detail)
    return None if found is None else found[1] or found[2]


def validation_error(error: ValidationError, body: Any) -> ChatError:
    first = error.errors()[0]
    place = ".".join(_place(first["loc"], body, is_missing=first["type"] == "missing")) or None
    if first["type"] == "extra_forbidden":
        return ChatError(
            400, f"{place}: is not known here: leave it out", param=place, code="unknown_parameter"
        )
    return ChatError(400, f"{place or 'the body'}: {first['msg']}", param=place, code="invalid_value")


def _place(location: Sequence[str | int], body: Any, *, is_missing: bool) -> Iterator[str]:
    """Yield the parts of a location that are in the body; pydantic adds the names of alternative types.

    is_missing: the body has no field of the last name.
    """
    for index, part in enumerate(location):
        is_there = isinstance(body, dict) and part in body
        is_there |= isinstance(body, list) and isinstance(part, int) and part < len(body)
        if is_there:
            body = body[part]
        if is_there or (is_missing and index == len(location) - 1):
            yield str(part)
