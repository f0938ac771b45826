"""A request for text, its answers, and one open conversation: its turns and their rewards.

Several answers to the same messages are siblings. Only the sibling that the next messages continue is learned
from. An answer that was not sampled from the policy is context of the next prompt, and no turn of its column.
"""

import asyncio
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from penstock.protocol.refusal import Reason, Refusal, Refused, invalid
from penstock.registry.records import MAX_CLIENT_KEY_LENGTH
from penstock.registry.routing import Arm
from penstock.workloads.language.conversation import LiveConversation, Sampled
from penstock.workloads.language.engine import LEAST_TEMPERATURE, LEAST_TOP_P
from penstock.workloads.language.prompt import Message
from penstock.workloads.plugin.serving import Episode, check_request_id, count_not_learned

MAX_COUNT: Final = 16
MAX_STOPS: Final = 16
MAX_TEXT: Final = 256
"""Most characters of a stop text, and of `begins_with`."""
MAX_BIASED: Final = 1024
"""Most token ids with a logit bias in one request."""
MAX_TOOLS: Final = 128
BYTES_PER_TOKEN: Final = 64
"""Messages with more bytes than this for each token that fits are refused unread."""
_MOST_BIAS: Final = 100.0
_TOOL_FORM: Final = 'write {"type": "function", "function": {"name": …, "parameters": …}}'

Finish = Literal["stop", "length", "tool_calls", "content_filter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """A request; the fields are those of `GenerateRequest`, None where the request leaves one out.

    may_be_shorter: where fewer than `max_tokens` fit, and as many as usual, the answer has those that do.
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    request_id: str = ""
    conversation_id: str = ""
    client_key: str = ""
    version: int = 0
    arm: Arm | None = None
    max_tokens: int = 0
    may_be_shorter: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    count: int = 1
    not_learned: bool = False
    regenerate: bool = False
    begins_with: str = ""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    thought_tokens: int | None = None
    show_thought: bool = False

    def check(self, vocabulary: int, most_thought: int = 0) -> None:
        """Raise Refused (INVALID), which names the field, for a request that cannot be answered.

        vocabulary: number of token ids. most_thought: tokens of a thought; 0: the model does not think.
        """
        check_request_id(self.request_id)
        check_client_key(self.client_key)
        _check_history(self.messages)
        _within("temperature", self.temperature, 0.0, 100.0)
        if 0.0 < self.temperature < LEAST_TEMPERATURE:
            raise invalid(f"temperature={self.temperature:g}: say 0, or {LEAST_TEMPERATURE:g} to 100")
        _within("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _within("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        _within("top_p", self.top_p, LEAST_TOP_P, 1.0)
        if not 1 <= self.count <= MAX_COUNT:
            raise invalid(f"count={self.count}: ask for 1 to {MAX_COUNT} answers")
        if len(self.stop) > MAX_STOPS or any(not 0 < len(text) <= MAX_TEXT for text in self.stop):
            raise invalid(f"stop: give at most {MAX_STOPS} texts of 1 to {MAX_TEXT} characters")
        if len(self.begins_with) > MAX_TEXT:
            raise invalid(
                f"begins_with: has {len(self.begins_with)} characters, at most {MAX_TEXT} are taken"
            )
        if len(self.logit_bias) > MAX_BIASED:
            raise invalid(f"logit_bias: has {len(self.logit_bias)} tokens, at most {MAX_BIASED} are taken")
        for token, amount in self.logit_bias.items():
            if not 0 <= token < vocabulary:
                raise invalid(f"logit_bias={token}: the vocabulary has the token ids 0 to {vocabulary - 1}")
            _within(f"logit_bias[{token}]", amount, -_MOST_BIAS, _MOST_BIAS)
        if (self.thought_tokens or 0) > most_thought:
            remedy = (
                f"ask for 0 to {most_thought}" if most_thought else "there are no thoughts here: leave it out"
            )
            raise invalid(f"thought_tokens={self.thought_tokens}: {remedy}")
        if self.conversation_id and (self.client_key or self.version or self.arm is not None):
            raise invalid("client_key, version, arm: are fixed when a conversation starts; leave them out")

    @property
    def unlearned(self) -> str:
        """Return why the answer is not learned from, by the sampling options; "": it may be."""
        if self.not_learned:
            return "unasked"
        options = (self.temperature, self.top_p, self.presence_penalty, self.frequency_penalty)
        changed = options != (1.0, 1.0, 0.0, 0.0) or self.seed is not None
        is_drawn_otherwise = changed or self.logit_bias or self.begins_with
        return "sampling" if is_drawn_otherwise else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextAnswer:
    """An answer. ids: as sampled. log_prob, tokens: log-probability and text of each id.

    ended: the model ended it itself. before: ids between the prompt and the answer. thought: the thought
    among them; None: there is none. The ids and log_prob of a blocked answer (`content_filter`) are for the
    learner alone.
    """

    message: Message
    ids: tuple[int, ...]
    log_prob: tuple[float, ...]
    tokens: tuple[str, ...]
    finish: Finish
    ended: bool
    before: tuple[int, ...] = ()
    thought: "Thought | None" = None

    @property
    def is_blocked(self) -> bool:
        return self.finish == "content_filter"

    def visible(self) -> "TextAnswer":
        """Return what a caller may see of it: the ids of a blocked answer would reveal its text."""
        return replace(self, ids=(), log_prob=(), tokens=()) if self.is_blocked else self


@dataclass(frozen=True, slots=True, kw_only=True)
class Thought:
    """A thought before an answer. tokens: their number. milliseconds: its duration.

    is_cut: its budget ended it. ids: as sampled. text: their text, for a caller. Of a hidden thought they are
    () and None.
    """

    tokens: int
    milliseconds: float
    is_cut: bool
    text: str | None = None
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TextReply:
    """The answers of one version; the fields are those of `GenerateReply`."""

    answers: tuple[TextAnswer, ...]
    version: int
    update: int
    arm: Arm
    is_fallback: bool
    prompt_tokens: int
    conversation_id: str = ""
    turn: int = 0
    unlearned: str = ""
    cut: str = ""


class OtherAnswer(Refused):
    """A reward does not say which of several answers it is for, or is for one that was thrown away."""

    def __init__(self, detail: str) -> None:
        super().__init__(Refusal(reason=Reason.INVALID, detail=detail))


def check_counts(
    most: int, *, messages: int, calls: int, tools: int, characters: int, stops: int, biased: int
) -> None:
    """Raise Refused for more than `most` messages or calls, or for too many of the other parts.

    The caller checks before it makes any object: an empty one has two bytes on the wire, hundreds in memory.
    """
    for name, count, limit in (
        ("messages", messages, most),
        ("messages.tool_calls", calls, most),
        ("tools", tools, MAX_TOOLS),
        ("tools (characters)", characters, BYTES_PER_TOKEN * most),
        ("stop", stops, MAX_STOPS),
        ("logit_bias", biased, MAX_BIASED),
    ):
        if count > limit:
            raise invalid(f"{name}: {count} are given, at most {limit} are taken")


def checked_tool(index: int, tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(f"tools[{index}]: {_TOOL_FORM}")
    made: dict[str, Any] = tool
    return made


def check_client_key(client_key: str) -> None:
    if len(client_key) > MAX_CLIENT_KEY_LENGTH:
        raise invalid(f"client_key of {len(client_key)} characters: at most {MAX_CLIENT_KEY_LENGTH}")


def _check_history(messages: Sequence[Message]) -> None:
    """Raise Refused where an assistant's message is the last, or a tool answers a call that was not made."""
    if not messages:
        raise invalid("messages: give at least one")
    last = len(messages) - 1
    if messages[last].role == "assistant":
        raise invalid(f"messages[{last}].role=assistant: the last message must be of a user or a tool")
    called = set[str]()
    for index, message in enumerate(messages):
        called |= {call.id for call in message.tool_calls}
        if message.role == "tool" and message.tool_call_id not in called:
            raise invalid(
                f"messages[{index}].tool_call_id: no call before has the id {message.tool_call_id[:80]!r}; "
                "send the assistant's message as it was answered"
            )


def _within(name: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise invalid(f"{name}={value:g}: say {low:g} to {high:g}")


# ---- Memory that conversations take, in bytes.

ID_BYTES: Final = 48
"""A token id in a tuple."""
SAMPLED_BYTES: Final = 256
"""A sampled token with its log-probability and its text."""
TURN_BYTES: Final = 256
_OBJECT_BYTES: Final = 96


def request_bytes(request: TextRequest) -> int:
    texts = [*request.stop, request.begins_with, request.client_key]
    return (
        sum(map(message_bytes, request.messages))
        + _of_values(request.tools)
        + sum(map(sys.getsizeof, texts))
        + _OBJECT_BYTES * (1 + len(request.logit_bias))
    )


def answer_bytes(answer: TextAnswer) -> int:
    size = SAMPLED_BYTES * len(answer.ids) + message_bytes(answer.message) + ID_BYTES * len(answer.before)
    if answer.thought is not None:
        size += ID_BYTES * len(answer.thought.ids) + sys.getsizeof(answer.thought.text)
    return size


def message_bytes(message: Message) -> int:
    return _OBJECT_BYTES * (1 + len(message.tool_calls)) + sum(
        sys.getsizeof(text) for _, text in message.texts
    )


def _of_values(values: Iterable[Any]) -> int:
    """Return the bytes of JSON values; without recursion, because they may be nested deeply."""
    size, waiting = 0, list(values)
    while waiting:
        value = waiting.pop()
        size += sys.getsizeof(value)
        if isinstance(value, dict):
            waiting += [*value, *value.values()]
        elif isinstance(value, list):
            waiting += value
    return size


# ---- One conversation of a client.


@dataclass(frozen=True, slots=True, kw_only=True)
class Sibling:
    """An answer that the next messages may continue. unlearned: why it is not learned from; "": it is.

    choice: its index among the answers of its reply. penalty: a reward that it gets as soon as it is a turn.
    """

    sampled: Sampled
    message: Message
    ended: bool
    unlearned: str = ""
    penalty: float = 0.0
    choice: int = 0


@dataclass(slots=True, eq=False)
class OpenConversation:
    """A conversation of a client, used by one event loop. episode: its id, owner, arm and rewards.

    busy: held while an answer is being made.
    """

    episode: Episode
    live: LiveConversation
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)
    is_keeping: bool = False
    """Late rewards are being written to the registry; no column of it is sent meanwhile."""
    counted_bytes: int = 0
    """The part of `held_bytes` that is counted in the total of all conversations."""
    ripening: int = 0
    """Finished columns that wait for late rewards."""
    _turns: list[int | None] = field(default_factory=list)
    """For each turn its number in the columns; None: it is in no column."""
    _choices: list[int] = field(default_factory=list)
    """For each turn the index of its answer in the reply."""
    siblings: list[Sibling] = field(default_factory=list)
    """Answers to the newest messages."""
    _last: tuple[TextRequest, TextReply] | None = None
    _asked_bytes: int = 0
    _last_bytes: int = 0
    _has_ended: bool = False
    """Whether the newest turn ended by itself."""
    has_failed: bool = False
    """Whether its client says that nothing can be learned from it."""

    @property
    def name(self) -> str:
        """Return its id without the part that proves that this server made it."""
        return self.episode.id.rpartition("-")[0]

    @property
    def turns(self) -> int:
        return len(self._turns) + bool(self.siblings)

    @property
    def next_turn(self) -> int:
        """Return the number of the turn that the next answer belongs to."""
        return len(self._turns)

    @property
    def held_bytes(self) -> int:
        size = ID_BYTES * self.live.held_tokens + TURN_BYTES * self.live.turns
        for one in self.siblings:
            size += SAMPLED_BYTES * len(one.sampled.ids) + message_bytes(one.message)
        if self._last is not None:
            answers = self._last[1].answers
            size += sum(answer_bytes(one) for one in answers)
            if self._last[0].messages is not self.live.asked:
                size += self._last_bytes
        return size + self._asked_bytes

    def repeated(self, request: TextRequest) -> TextReply | None:
        """Return the reply to the same request before; None for another request, or with `regenerate`."""
        if self._last is None or request.regenerate or self._last[0] != _what(request):
            return None
        return self._last[1]

    def prompt_for(self, request: TextRequest, most: int, update: int) -> tuple[int, ...]:
        """Return the ids of the prompt for these messages; raises ValueError as `LiveConversation.ask`.

        most: tokens of an answer. update: number of the update that made the weights that will answer.
        """
        if self.siblings and request.messages == self.live.asked:
            return self.live.prompt
        self.choose(request.messages)
        prompt = self.live.ask(request.messages, answer_tokens=most, update=update, tools=request.tools)
        self._asked_bytes = request_bytes(request)
        return prompt

    def answered(self, request: TextRequest, reply: TextReply, siblings: Sequence[Sibling]) -> None:
        self.siblings.extend(siblings)
        self._last, self._last_bytes = (_what(request), reply), request_bytes(request)

    @property
    def dropped_as(self) -> str:
        """Return why its columns are not learned from; "": they are. Without a reward nothing is known."""
        if self.has_failed:
            return "failed"
        return "unrewarded" if self.episode.is_over and not self.episode.is_rewarded else ""

    def choose(self, messages: tuple[Message, ...] = (), choice: int = 0) -> None:
        """Choose which sibling becomes the turn: the one that these messages continue, else a newest one.

        choice: its index in the newest reply.
        """
        siblings, self.siblings = self.siblings, []
        if not siblings:
            return
        asked, count = self.live.asked, len(self.live.asked)
        follows = messages[count] if messages[:count] == asked and len(messages) > count else None
        newest = siblings[choice - self._newest_answers]
        chosen = next((one for one in reversed(siblings) if one.message == follows), newest)
        self._choices.append(chosen.choice)
        for one in siblings:
            if one is not chosen:
                count_not_learned("sibling", len(one.sampled.ids))
        if chosen.unlearned:
            count_not_learned(chosen.unlearned, len(chosen.sampled.ids))
            self._turns.append(None)
        else:
            self._turns.append(self.live.answer(chosen.sampled, chosen.message))
            if chosen.penalty:
                self.reward(len(self._turns) - 1, chosen.penalty)
        self._has_ended = chosen.ended

    # ---- rewards

    @property
    def _newest_answers(self) -> int:
        return 0 if self._last is None else len(self._last[1].answers)

    def place_of(self, turn: int | None, choice: int | None = None) -> int:
        """Return the number of a turn; None: the newest, for which a sibling is chosen.

        choice: of this turn, as of `choose`. Raises ValueError, and OtherAnswer.
        """
        number, count = self.turns - 1 if turn is None else turn, self._newest_answers
        if not 0 <= number < self.turns:
            raise ValueError(f"turn={number}: the conversation has {self.turns} so far")
        if number < len(self._turns):
            if choice not in (None, self._choices[number]):
                kept = self._choices[number]
                raise OtherAnswer(f"choice={choice}: answer {kept} of turn {number} was kept; say it or none")
        elif choice is None and count > 1:
            raise OtherAnswer(f"choice: the turn has {count} answers; say which one, from 0")
        elif choice is not None and choice >= count:
            raise ValueError(f"choice={choice}: the turn has {count} answers; say which one, from 0")
        else:
            self.choose(choice=choice or 0)
        return number

    def is_late(self, turn: int) -> bool:
        index = self._turns[turn]
        return index is not None and not self.live.is_open(index)

    def reward(self, turn: int, amount: float) -> None:
        index = self._turns[turn]
        if index is not None:
            self.live.reward(amount, index)
        self.episode.add_reward(turn, amount)

    # ---- the end

    def end(self, *, terminated: bool) -> None:
        """End it; where its last answer was cut short, its column is truncated in any case."""
        self.choose()
        self.live.end(terminated=terminated and self._has_ended)
        self._release()

    def give_up(self) -> None:
        self.choose()
        if left_out := self.live.give_up():
            count_not_learned("abandoned", left_out)
        self._release()

    def _release(self) -> None:
        """Drop the reply that could be repeated; finished columns may still wait for late rewards."""
        self._last = None
        self._asked_bytes = self._last_bytes = 0


def _what(request: TextRequest) -> TextRequest:
    return replace(request, request_id="", regenerate=False)
