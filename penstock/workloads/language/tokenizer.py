"""Prompts and responses as token ids.

Prompt and response are tokenised apart, so that the border between them never moves. A row that is too long
loses the beginning of its prompt. A response is never cut, and ends with `<eos>` unless its length limit
ended it.
"""

import json
import re
import secrets
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, Final

import torch
from jinja2 import TemplateError
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, GenerationConfig, PretrainedConfig

from penstock.config.settings import ConfigurationError
from penstock.workloads.language.prompt import Message, Prompt, ToolCall, plain
from penstock.workloads.language.settings import place_of, reading

Tokenizer = Any
"""transformers.PreTrainedTokenizerBase, which comes without types."""


Tools = Sequence[dict[str, Any]]
"""Functions that the model may call, in the form {"type": "function", "function": {…}}."""


class TooLong(ValueError):
    """A response that does not fit."""


def load_tokenizer(place: str) -> Tokenizer:
    """Return the tokenizer of a folder or a hub name.

    Models for classification read the last token that is not padding: with `<pad>` = `<eos>` they would never
    see the end token of a response. Raises ConfigurationError, also where the model beside it has fewer
    embeddings than it has tokens.
    """
    folder = place_of("model", place)
    with reading("model", place, "no tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    if eos is None:
        raise ConfigurationError(
            f"model={place}: its tokenizer has no eos token: set one and save it with the model"
        )
    if pad is None or pad == eos:
        what = "no pad token" if pad is None else "the pad token of eos"
        raise ConfigurationError(
            f"model={place}: its tokenizer has {what}: choose an unused token (tokenizer.pad_token = '…'), "
            "or add one and resize the model's embeddings, and save both"
        )
    named, rows = _of_model(folder)
    # Some models of text keep the tokens of images and sound, which no text may hold, beyond their embedding.
    other = {getattr(tokenizer, f"{kind}_token", None) for kind in ("image", "audio", "video")}
    beyond = sorted(
        word for word, index in tokenizer.get_vocab().items() if index >= rows and word not in other
    )
    if beyond:
        raise ConfigurationError(
            f"model={place}: its tokenizer has {len(tokenizer)} tokens, of which {beyond[0][:40]!r} has no "
            f"embedding: there are {rows}; call model.resize_token_embeddings(len(tokenizer)) and save both"
        )
    tokenizer.named_ends = named
    return tokenizer


def _of_model(folder: str) -> tuple[list[int], float]:
    """Return the end tokens that a model's files name, and the number of its embeddings, at most infinity.

    Of the ends `generate` of transformers takes the same.
    """
    config: dict[str, Any] = {}
    with suppress(OSError):
        config = PretrainedConfig.get_config_dict(folder)[0]
    ends, text = config.get("eos_token_id"), config.get("text_config") or config
    with suppress(OSError):
        ends = GenerationConfig.from_pretrained(folder).eos_token_id
    rows = text.get("vocab_size")
    named = ends if isinstance(ends, list) else [ends]
    return [one for one in named if isinstance(one, int)], rows if isinstance(rows, int) else float("inf")


def end_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that end an answer, `<eos>` first.

    The others are those that the model's files name, and what its chat template writes behind an answer.
    """
    ends = [tokenizer.eos_token_id, *getattr(tokenizer, "named_ends", ())]
    with suppress(ValueError):  # A model without a chat template takes no conversations.
        ends.append(ChatTemplate(tokenizer).end_id)
    return list(dict.fromkeys(ends))


def without_end(ids: Sequence[int], ends: Sequence[int]) -> Sequence[int]:
    return ids[:-1] if ids and ids[-1] in ends else ids


# ---- What the chat template makes of messages.

OF_ANSWERS: Final = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Marks that a model writes within its answers, whose text they may hold when it comes back."""
_CALL: Final = ToolCall("call00000", "name", "{}")
_ASKED: Final = Message("user", "text")
_ROLES: Final = ("user", "system", "tool", "assistant")
_SIGN: Final = re.compile(r"[^\w\s]")


def new_mark() -> str:
    """Return a text that no message holds, because it is drawn when it is needed."""
    return f"mark{secrets.token_hex(16)}"


class ChatTemplate:
    """Renders messages. A few renderings at the beginning show how the template takes them.

    end_id: the token that it writes behind an answer; `<eos>` where it writes none. controls: the tokens with
    which one role could pose as another: the special ones, and others that the template itself writes.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raise ValueError for a tokenizer without a template, and where it leaves out what users say."""
        if tokenizer.chat_template is None:
            raise ValueError(
                "the tokenizer has no chat template: set tokenizer.chat_template and save it with the model"
            )
        self._tokenizer, self._mark = tokenizer, new_mark()
        self._in_parts, self._left_out = set[str](), set[str]()
        texts = [*map(self._try, _ROLES)]
        if "user" in self._left_out:
            raise ValueError("the chat template leaves out what users say: correct it and save it")
        special, added = set(tokenizer.all_special_tokens), tokenizer.get_added_vocab()
        # Words and blanks that a tokenizer has as tokens of their own are text, wherever they stand.
        marks = [one for one in added if one.strip() and not one.replace(" ", "").isalnum()]
        tail = tokenizer(texts[-1].partition(self._mark)[2].lstrip(), add_special_tokens=False)["input_ids"]
        is_mark = bool(tail) and tokenizer.convert_ids_to_tokens(tail[0]) in special.union(marks)
        self.end_id: int = tail[0] if is_mark else tokenizer.eos_token_id
        # Of tools and of other roles only the template's source knows.
        source = [one for one in marks if one[0] in "<[|" and one in str(tokenizer.chat_template)]
        written = {
            one for one in marks if one in (*OF_ANSWERS, *source) or any(one in text for text in texts)
        }
        self.controls = sorted(special | written)

    def render(
        self, messages: Sequence[Message], tools: Tools = (), *, opens: bool, harmless: bool = False
    ) -> str:
        """Return the text of messages; raises ValueError for those that the template does not take.

        opens: it ends where the assistant begins. harmless: with a letter for each sign of a message or tool.
        """
        for index, one in enumerate(messages):
            if one.content and one.role in self._left_out:
                raise ValueError(
                    f"messages[{index}].content: the model's chat template leaves out what a {one.role} says"
                )
        try:
            values = [self._value(one, harmless=harmless) for one in plain(tuple(messages))]
            text: str = self._tokenizer.apply_chat_template(
                values,
                tools=(_harmless(list(tools)) if harmless else list(tools)) or None,
                tokenize=False,
                add_generation_prompt=opens,
            )
        except (TemplateError, TypeError, RecursionError) as error:
            raise ValueError(f"messages: the model's chat template does not take them: {error}") from error
        return text

    def _value(self, message: dict[str, Any], *, harmless: bool) -> dict[str, Any]:
        """Return a message for the template; the arguments of tool calls are objects where they are JSON."""
        role = message["role"]
        for call in message.get("tool_calls", ()):
            with suppress(ValueError, RecursionError):  # The model wrote no JSON: the template gets its text.
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        if harmless:
            message = {**_harmless(message), "role": role}
        if role in self._in_parts:
            message["content"] = [{"type": "text", "text": message["content"]}]
        return message

    def _try(self, role: str) -> str:
        """Return how the template renders a mark that a role says, and note how it takes its content."""
        said = Message(role, self._mark, tool_call_id=_CALL.id if role == "tool" else "")
        before = {"system": [], "user": [], "tool": [_ASKED, Message("assistant", "", (_CALL,))]}
        messages = [*before.get(role, [_ASKED]), said, *([_ASKED] if role == "system" else [])]
        found = list[str]()
        for in_parts in (set[str](), {role}):
            self._in_parts |= in_parts
            with suppress(ValueError):
                found.append(self.render(messages, opens=False))
                if self._mark in found[-1]:
                    return found[-1]
        self._in_parts.discard(role)
        self._left_out |= {role} if found else set()
        return ""


def _harmless(value: Any) -> Any:
    """Return a JSON value with a letter for each sign in its texts, of which no control token can be made."""
    if isinstance(value, str):
        return _SIGN.sub("x", value)
    if isinstance(value, dict):
        return {_harmless(name): _harmless(one) for name, one in value.items()}
    return [_harmless(one) for one in value] if isinstance(value, list) else value


# ---- Rows of token ids.


class Encoder:
    """Encodes rows of at most `max_tokens` tokens. Used by one thread at a time."""

    def __init__(self, tokenizer: Tokenizer, max_tokens: int) -> None:
        self.tokenizer, self.max_tokens = tokenizer, max_tokens
        self.cut = 0
        """Number of prompts that lost their beginning."""

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer)

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            ids = list(self.tokenizer(prompt)["input_ids"])
            # Some tokenizers add an end token; the response follows here.
            return ids[:-1] if ids and ids[-1] == self.tokenizer.eos_token_id else ids
        if self.tokenizer.chat_template is None:
            raise ValueError(
                "the prompt is a conversation and the tokenizer has no chat template: give it as text"
            )
        text = self._template.render(prompt, opens=True)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def response_ids(self, response: str, *, cut_short: bool = False) -> list[int]:
        """Return the token ids of a response, with `<eos>` unless its length limit ended it."""
        ids = list(self.tokenizer(response, add_special_tokens=False)["input_ids"])
        return ids if cut_short and ids else [*ids, self.tokenizer.eos_token_id]

    def encode(self, prompt: Prompt, response: str, *, cut_short: bool = False) -> list[int]:
        """Return prompt and response as one row; raises ValueError, TooLong as `join`."""
        return self.join(self.prompt_ids(prompt), self.response_ids(response, cut_short=cut_short))

    def join(self, prompt: Sequence[int], response: Sequence[int]) -> list[int]:
        """Return one row of at most `max_tokens`; a cut prompt keeps its `<bos>`. Raises TooLong."""
        room = self.max_tokens - len(response)
        bos = [prompt[0]] if prompt and prompt[0] == self.tokenizer.bos_token_id else []
        if room < len(bos):
            raise TooLong(f"the response has {len(response)} tokens, {self.max_tokens} fit: raise max_tokens")
        if len(prompt) <= room:
            return [*prompt, *response]
        self.cut += 1
        kept = room - len(bos)
        return [*bos, *prompt[len(prompt) - kept :], *response]


def pad(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Return ids and mask of rows, none empty: int64 [B, T], padded on the right; 1 where a token is."""
    lengths = torch.tensor([len(row) for row in rows])
    ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=pad_id)
    return ids, (torch.arange(ids.shape[1]) < lengths[:, None]).long()
