"""Prompts and responses as token ids.

Prompt and response are tokenised apart, so that the border between them never moves. A row that is too long
loses the beginning of its prompt. A response is never cut, and ends with `<eos>` unless its length limit
ended it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer

from penstock.config.settings import ConfigurationError
from penstock.workloads.language.prompt import Prompt, plain
from penstock.workloads.language.settings import place_of, reading

Tokenizer = Any
"""transformers.PreTrainedTokenizerBase, which comes without types."""


class TooLong(ValueError):
    """A response that does not fit."""


def load_tokenizer(place: str) -> Tokenizer:
    """Return the tokenizer of a folder or a hub name.

    Models for classification read the last token that is not padding: with `<pad>` = `<eos>` they would never
    see the end token of a response. Raises ConfigurationError.
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
    return tokenizer


class Encoder:
    """Encodes rows of at most `max_tokens` tokens. Used by one thread at a time."""

    def __init__(self, tokenizer: Tokenizer, max_tokens: int) -> None:
        self.tokenizer, self.max_tokens = tokenizer, max_tokens
        self.cut = 0
        """Number of prompts that lost their beginning."""

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            ids = list(self.tokenizer(prompt)["input_ids"])
            # Some tokenizers add an end token; the response follows here.
            return ids[:-1] if ids and ids[-1] == self.tokenizer.eos_token_id else ids
        if self.tokenizer.chat_template is None:
            raise ValueError(
                "the prompt is a conversation and the tokenizer has no chat template: give it as text"
            )
        text = self.tokenizer.apply_chat_template(plain(prompt), tokenize=False, add_generation_prompt=True)
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
