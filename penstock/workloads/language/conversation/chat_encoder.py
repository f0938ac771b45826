"""Messages as token ids, by the chat template of the tokenizer, and how a conversation goes on.

What was sampled is never tokenised again: `follow` renders the messages before it with a mark in place of the
answer, and tokenises only what the template puts behind the mark. A template that renders earlier messages
otherwise once others follow them (some leave out what was thought) cannot be continued.
"""

import json
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final

from jinja2 import TemplateError

from penstock.workloads.language.prompt import Message, plain
from penstock.workloads.language.tokenizer import Tokenizer

_MARK: Final = "⟦answer⟧"

Tools = Sequence[dict[str, Any]]
"""Functions that may be called, as the template takes them: {"type": "function", "function": {…}} each."""


class NotContinued(ValueError):
    """What follows cannot be put behind what was sampled."""


class ForeignWord(ValueError):
    """A word that the model does not have. unquoted: the same without the word, which is its caller's."""

    def __init__(self, place: str, word: str, words: int) -> None:
        of = f"none of the {words} words of the model"
        super().__init__(f"{place}: {word[:40]!r} is {of}; write those, with blanks between them")
        self.unquoted = f"{place}: a word is {of}"


class ChatEncoder:
    """Used by one thread at a time; raises ValueError for a tokenizer without a chat template."""

    def __init__(self, tokenizer: Tokenizer, words: Collection[str] | None = None) -> None:
        """words: that messages may hold, with blanks between them; None: any text."""
        if tokenizer.chat_template is None:
            raise ValueError(
                "the tokenizer has no chat template: set tokenizer.chat_template and save it with the model"
            )
        self._tokenizer = tokenizer
        self._words = None if words is None else frozenset(words)
        self._controls = sorted(set(tokenizer.all_special_tokens) | set(tokenizer.get_added_vocab()))

    def begin(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Ids of a prompt that ends where the assistant begins.

        Raises ValueError for texts with control tokens, and for what the template does not take.
        """
        self._check(messages, tools)
        return self._ids(self._render(messages, tools, opens=True))

    def follow(
        self, before: Sequence[Message], last_id: int, new: Sequence[Message], tools: Tools = ()
    ) -> list[int]:
        """Ids between an answer's last token and the next answer.

        before: the messages that the answer answered. last_id: its last token, which may be its end.
        new: the messages after it, at least one. Raises NotContinued, and ValueError as `begin`.
        """
        self._check(new, tools)
        answered = [*before, Message("assistant", _MARK)]
        whole = self._render([*answered, *new], tools, opens=True)
        head, mark, tail = whole.partition(_MARK)
        if not mark or not self._render(answered, tools, opens=False).startswith(head + mark):
            raise NotContinued("messages: the chat template changes earlier messages when others follow them")
        end = self._tokenizer.eos_token
        if last_id == self._tokenizer.eos_token_id and tail.lstrip().startswith(end):
            tail = tail.lstrip().removeprefix(end)
        return self._ids(tail)

    def _check(self, messages: Sequence[Message], tools: Tools) -> None:
        """Text of people and tools holds no control tokens: it could speak in another's name."""
        for index, message in enumerate(messages):
            for field, text in _texts(message):
                self._check_text(f"messages[{index}].{field}", text)
            self._check_words(index, message.content)
        for index, tool in enumerate(tools):
            self._check_text(f"tools[{index}]", _written(index, tool))

    def _check_text(self, name: str, text: str) -> None:
        for control in self._controls:
            if control in text:
                raise ValueError(
                    f"{name} holds {control!r}, which is a control token of the model: leave it out"
                )

    def _check_words(self, index: int, text: str) -> None:
        if self._words is None:
            return
        for word in text.split():
            if word not in self._words:
                raise ForeignWord(f"messages[{index}].content", word, len(self._words))

    def _render(self, messages: Sequence[Message], tools: Tools, *, opens: bool) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                [_with_objects(message) for message in plain(tuple(messages))],
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=opens,
            )
        except (TemplateError, TypeError, RecursionError) as error:
            raise ValueError(f"messages: the model's chat template does not take them: {error}") from error
        return text

    def _ids(self, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"messages, tools: hold what is no Unicode text: {error.reason}") from error
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _written(index: int, tool: dict[str, Any]) -> str:
    try:
        return json.dumps(tool, ensure_ascii=False)
    except RecursionError as error:
        raise ValueError(f"tools[{index}]: is nested too deep: {error}") from error


def _texts(message: Message) -> Iterator[tuple[str, str]]:
    """What a template may show of a message, by field."""
    yield from (("content", message.content), ("role", message.role), ("tool_call_id", message.tool_call_id))
    for call in message.tool_calls:
        yield from (("tool_calls.id", call.id), ("tool_calls.name", call.name))
        yield "tool_calls.arguments", call.arguments


def _with_objects(message: dict[str, Any]) -> dict[str, Any]:
    """A message as templates want it: the arguments of tool calls as an object, where they are one."""
    for call in message.get("tool_calls", ()):
        try:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        except (ValueError, RecursionError):
            continue  # A model may write what is no JSON; the template gets its text.
    return message
