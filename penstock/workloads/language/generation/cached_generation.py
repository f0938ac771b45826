"""The reference backend: a causal language model of transformers, one token of all responses at a time.

    prompts, padded on the left ─► forward, keys and values kept ─► draw ─► forward of that token ─► draw ─► …

A prompt of several responses is read once. Once half of the responses have ended their rows leave the batch
and the cache, so that a long one does not keep all the others company.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import Cache, DynamicLayer

from penstock.workloads.language.loading import device_of
from penstock.workloads.language.tokenizer import Tokenizer

# ---- What generates responses, as a generator sees it: prompts in; tokens, and the log-probability of
# each, out.


@dataclass(frozen=True, slots=True)
class Generated:
    """Responses to N prompts, padded on the right to the longest of L tokens.

    tokens: int64 [N, L], the response's own, `<eos>` last where it ended with one.
    log_prob: float32 [N, L], 0 behind the end.
    lengths: int64 [N].
    ended: bool [N], with `<eos>`.
    whole: bool [N], with `<eos>` or at the most tokens there may be; false: generation was stopped before.
    """

    tokens: NDArray[np.int64]
    log_prob: NDArray[np.float32]
    lengths: NDArray[np.int64]
    ended: NDArray[np.bool_]
    whole: NDArray[np.bool_]

    def response(self, row: int) -> tuple[int, ...]:
        """Token ids of one response."""
        return tuple(self.tokens[row, : self.lengths[row]].tolist())


class Backend(Protocol):
    """Generates with the weights of this moment."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        most: int,
        *,
        deterministic: bool = False,
        is_over: Callable[[], bool] = lambda: False,
        on_token: Callable[[], None] = lambda: None,
    ) -> Generated:
        """At most `most` tokens for each prompt, none of which is empty.

        deterministic: the most likely token each time, not drawn. is_over: asked for each token; when it is,
        what there is so far is returned. on_token: called for each.
        """

    def seed(self, seed: int) -> None:
        """Draw from here on as every backend of this kind does after this seed."""


# ---- Tokens drawn from log-probabilities by one number each.


def draw(log_probs: Tensor, uniform: Tensor) -> Tensor:
    """Return a token for each row, int64 [N].

    log_probs: [N, V], of which a row need not add up to 1. uniform: float64 [N], in [0, 1).
    """
    sums = log_probs.exp().cumsum(-1, dtype=torch.float64)
    total = sums[:, -1]
    # Below the total, which rounding could reach: a token without a share is never drawn.
    point = torch.minimum(uniform * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(sums, point[:, None], right=True)[:, 0]


def only_likely(log_probs: Tensor, share: float) -> Tensor:
    """Without the least likely tokens that are not needed for this share, [V] → [V] (nucleus sampling)."""
    ordered, order = log_probs.sort(descending=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    before[0] = -1.0  # the likeliest stays, however the sum is rounded
    return log_probs.index_fill(0, order[before >= share], -torch.inf)


# ---- Keys and values of a layer for rows that come and go.


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values, [B, H, L, D] each, in memory that doubles when it is full.

    Transformers copies all of it for each token.
    """

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Begin without places; key_states, value_states: [B, H, L, D], as of `DynamicLayer`."""
        super().lazy_initialization(key_states, value_states)
        self._rooms = [states[:, :, :0] for states in (key_states, value_states)]

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append the states of new places and return those of all, [B, H, L, D] each."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        held = self.get_seq_length()
        end = held + key_states.shape[2]
        if end > self._rooms[0].shape[2]:
            self._rooms = [_doubled(room, held, end) for room in self._rooms]
        for room, states in zip(self._rooms, (key_states, value_states), strict=True):
            room[:, :, held:end] = states
        self.keys, self.values = (room[:, :, :end] for room in self._rooms)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows at int64 indices [b], in this order."""
        held = self.get_seq_length()
        self._rooms = [room[indices] for room in self._rooms]
        self.keys, self.values = (room[:, :, :held] for room in self._rooms)

    def forget(self, count: int) -> None:
        """Drop the first `count` places of every row."""
        self._hold(self.keys[:, :, count:], self.values[:, :, count:])

    def join(self, other: "GrowingLayer") -> None:
        """Take the rows of another; the shorter ones get places before them."""
        longest = max(self.get_seq_length(), other.get_seq_length())
        keys, values = (
            torch.cat([_with_places_before(one, longest) for one in both])
            for both in ((self.keys, other.keys), (self.values, other.values))
        )
        self._hold(keys, values)

    def _hold(self, keys: Tensor, values: Tensor) -> None:
        self._rooms = [keys, values]
        self.keys, self.values = keys, values


def _doubled(room: Tensor, held: int, needed: int) -> Tensor:
    """Room for twice of what is needed, [B, H, 2 · needed, D], with what is held."""
    larger = room.new_empty((*room.shape[:2], 2 * needed, room.shape[3]))
    larger[:, :, :held] = room[:, :, :held]
    return larger


def _with_places_before(states: Tensor, length: int) -> Tensor:
    return functional.pad(states, (0, 0, length - states.shape[2], 0))


class CachedGeneration:
    """Generates with a key-value cache.

    model: any causal language model of transformers, with or without an adapter.
    """

    def __init__(self, model: Any, *, eos_id: int, pad_id: int) -> None:
        self._model, self._eos, self._pad = model, eos_id, pad_id
        self._device: torch.device = model.device
        self._random = torch.Generator(self._device)

    def seed(self, seed: int) -> None:
        """See `Backend`."""
        self._random.manual_seed(seed)

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        most: int,
        *,
        deterministic: bool = False,
        is_over: Callable[[], bool] = lambda: False,
        on_token: Callable[[], None] = lambda: None,
    ) -> Generated:
        """See `Backend`."""
        distinct = {tuple(prompt): number for number, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
        prompt_of = torch.tensor([distinct[tuple(prompt)] for prompt in prompts], device=self._device)
        batch = _Batch(*left_padded(list(distinct), self._pad, self._device), prompt_of)
        tokens = torch.full((len(prompts), most), self._pad, device=self._device)
        log_prob = torch.zeros((len(prompts), most), device=self._device)
        lengths = torch.full((len(prompts),), most, device=self._device)
        ended = torch.zeros(len(prompts), dtype=torch.bool, device=self._device)
        step = 0
        while step < most and not batch.is_empty and not is_over():
            log_probs = torch.log_softmax(batch.forward(self._model), -1)
            drawn = self._draw(log_probs, deterministic=deterministic)
            tokens[batch.rows, step] = torch.where(batch.alive, drawn, self._pad)
            log_prob[batch.rows, step] = log_probs.gather(1, drawn[:, None])[:, 0] * batch.alive
            step += 1
            done = batch.alive & (drawn == self._eos)
            lengths[batch.rows[done]] = step
            ended[batch.rows[done]] = True
            batch.follow(drawn, done)
            on_token()
        lengths.clamp_(max=step)
        arrays = (tokens[:, :step], log_prob[:, :step], lengths, ended, ended | (step == most))
        return Generated(*(array.cpu().numpy() for array in arrays))

    def _draw(self, log_probs: Tensor, *, deterministic: bool) -> Tensor:
        """A token for each row of log-probabilities [N, V]."""
        if deterministic:
            return log_probs.argmax(-1)
        # One number for each row; `multinomial` asks the generator for one for each token of the vocabulary.
        uniform = torch.rand(
            len(log_probs), generator=self._random, dtype=torch.float64, device=log_probs.device
        )
        return draw(log_probs, uniform)


def make_backend(policy: Any, tokenizer: Tokenizer, device: str) -> Backend:
    """Return the backend that generates with a `LanguagePolicy`, whose network moves to the device.

    device: as torch names it, or "auto": a GPU where there is one.
    """
    policy.to(device_of(device))
    return CachedGeneration(policy.network, eos_id=tokenizer.eos_token_id, pad_id=tokenizer.pad_token_id)


class _Batch:
    """Rows that are being continued: what the model sees next, and what it remembers of what it saw.

    ids, mask: int64 [D, P], of the prompts, each of which is read once.   prompt_of: int64 [N], theirs.
    rows: int64 [M], which of the N.   alive: bool [M], not yet ended.
    """

    def __init__(self, ids: Tensor, mask: Tensor, prompt_of: Tensor) -> None:
        self._ids, self._mask = ids, mask
        self._positions = (mask.cumsum(1) - 1).clamp(min=0)
        self._cache = Cache(layer_class_to_replicate=GrowingLayer)
        self._unread: Tensor | None = prompt_of
        self.rows = torch.arange(len(prompt_of), device=ids.device)
        self.alive = torch.ones(len(prompt_of), dtype=torch.bool, device=ids.device)
        self.is_empty = False

    def forward(self, model: Any) -> Tensor:
        """Logits of the next token, float32 [M, V]."""
        logits = (
            model(
                input_ids=self._ids,
                attention_mask=self._mask,
                position_ids=self._positions,
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
            )
            .logits[:, -1]
            .float()
        )
        if self._unread is not None:
            prompt_of, self._unread = self._unread, None
            self._select(prompt_of)
            logits = logits[prompt_of]
        return logits  # type: ignore[no-any-return]

    def follow(self, drawn: Tensor, done: Tensor) -> None:
        """Go on with these tokens, without the rows that are done where that is worth it."""
        self.alive = self.alive & ~done
        self._ids = drawn[:, None]
        self._mask = torch.cat([self._mask, torch.ones_like(self._ids)], 1)
        self._positions = self._positions[:, -1:] + 1
        left = int(self.alive.sum())
        self.is_empty = left == 0
        if 0 < left <= len(self.rows) // 2:
            self._keep(self.alive.nonzero()[:, 0])

    def _keep(self, kept: Tensor) -> None:
        self._select(kept)
        self.rows, self.alive = self.rows[kept], self.alive[kept]

    def _select(self, rows: Tensor) -> None:
        self._cache.batch_select_indices(rows)
        self._ids, self._mask, self._positions = self._ids[rows], self._mask[rows], self._positions[rows]


def left_padded(prompts: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and mask, int64 [N, P] each: the last token of every prompt is in the last column."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad_id] * (longest - len(one)) + list(one) for one in prompts], device=device)
    lengths = torch.tensor([len(one) for one in prompts], device=device)
    return ids, (torch.arange(longest, device=device) >= longest - lengths[:, None]).long()
