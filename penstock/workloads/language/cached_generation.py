"""Generation by a causal language model of transformers, one token of all responses at a time.

A prompt of several responses is read once. Once half of the responses have ended, their rows leave the batch
and the cache, so that a long response does not cost computation for the others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import Cache, DynamicLayer

from penstock.workloads.language.tokenizer import Tokenizer, end_ids


@dataclass(frozen=True, slots=True)
class Generated:
    """Responses to N prompts, padded on the right to the longest of L tokens.

    tokens: int64 [N, L], the response's own, an end token last where it ended with one.
    log_prob: float32 [N, L], 0 behind the end.
    lengths: int64 [N].
    ended: bool [N], with an end token.
    whole: bool [N], with an end token or at the limit of tokens; false: generation was stopped before.
    """

    tokens: NDArray[np.int64]
    log_prob: NDArray[np.float32]
    lengths: NDArray[np.int64]
    ended: NDArray[np.bool_]
    whole: NDArray[np.bool_]

    def response(self, row: int) -> tuple[int, ...]:
        return tuple(self.tokens[row, : self.lengths[row]].tolist())


# ---- Tokens drawn from log-probabilities by one number each.


def draw(log_probs: Tensor, uniform: Tensor) -> Tensor:
    """Return a drawn token for each row, int64 [N].

    log_probs: [N, V], whose rows need not sum to 1. uniform: float64 [N], in [0, 1).
    """
    sums = log_probs.exp().cumsum(-1, dtype=torch.float64)
    total = sums[:, -1]
    # Below the total, which rounding could reach: a token of probability 0 is never drawn.
    point = torch.minimum(uniform * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(sums, point[:, None], right=True)[:, 0]


def only_likely(log_probs: Tensor, share: float) -> Tensor:
    """Keep the most likely tokens that together have this share, [V] → [V] (nucleus sampling)."""
    ordered, order = log_probs.sort(descending=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    before[0] = -1.0  # the most likely token stays, however the sum is rounded
    return log_probs.index_fill(0, order[before >= share], -torch.inf)


# ---- Keys and values of a layer for rows that come and go.


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values, [B, H, L, D] each, in memory that doubles when it is full.

    The layer of transformers copies all of it for each token.
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
        held = self.get_seq_length()
        self._rooms = [room[indices] for room in self._rooms]
        self.keys, self.values = (room[:, :, :held] for room in self._rooms)

    def forget(self, count: int) -> None:
        self._hold(self.keys[:, :, count:], self.values[:, :, count:])

    def join(self, other: "GrowingLayer") -> None:
        """Take the rows of another; the shorter ones get places before them."""
        longest = max(self.get_seq_length(), other.get_seq_length())
        keys, values = (
            torch.cat([functional.pad(one, (0, 0, longest - one.shape[2], 0)) for one in both])
            for both in ((self.keys, other.keys), (self.values, other.values))
        )
        self._hold(keys, values)

    def _hold(self, keys: Tensor, values: Tensor) -> None:
        self._rooms = [keys, values]
        self.keys, self.values = keys, values


def _doubled(room: Tensor, held: int, needed: int) -> Tensor:
    """Return memory for twice the needed places, [B, H, 2 · needed, D], with the held ones."""
    larger = room.new_empty((*room.shape[:2], 2 * needed, room.shape[3]))
    larger[:, :, :held] = room[:, :, :held]
    return larger


# ---- Rows that are being continued, one token of all at a time; rows join and leave in between.


class RunningBatch:
    """M rows of one version, for one thread. Each call is given the network with its weights."""

    def __init__(self, pad_id: int, device: torch.device) -> None:
        self._pad, self._device = pad_id, device
        self._cache: Any = None
        self._mask = torch.zeros((0, 0), dtype=torch.long, device=device)
        self._positions = torch.zeros((0, 1), dtype=torch.long, device=device)

    def __len__(self) -> int:
        return len(self._mask)

    @property
    def places(self) -> int:
        return self._mask.shape[1]

    def join(self, network: Any, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Read prompts, none empty, as the last rows; return the logits of their next tokens, [k, V]."""
        ids, mask = left_padded(prompts, self._pad, self._device)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        cache: Any = Cache(layer_class_to_replicate=GrowingLayer)
        logits = _logits(network, ids, mask, positions, cache)
        if len(self):
            for mine, theirs in zip(self._cache.layers, cache.layers, strict=True):
                mine.join(theirs)
        else:
            self._cache = cache
            self._mask = self._mask.new_zeros((0, mask.shape[1]))
        longest = max(self.places, mask.shape[1])
        masks = (functional.pad(one, (longest - one.shape[1], 0)) for one in (self._mask, mask))
        self._mask = torch.cat([*masks])
        self._positions = torch.cat([self._positions, positions[:, -1:]])
        return logits

    def forward(self, network: Any, newest: Tensor) -> Tensor:
        """Read the newest token of each row, int64 [M]; return the logits of the next, [M, V]."""
        self._mask = functional.pad(self._mask, (0, 1), value=1)
        self._positions = self._positions + 1
        return _logits(network, newest[:, None], self._mask, self._positions, self._cache)

    def select(self, rows: Tensor) -> None:
        """Keep these rows, int64 [K], in this order; an index may occur several times."""
        self._mask, self._positions = self._mask[rows], self._positions[rows]
        self._cache.batch_select_indices(rows)

    def keep(self, rows: Tensor) -> None:
        """Keep these rows, at least one, and drop the places that none of them uses."""
        self.select(rows)
        unused = int(self._mask.any(0).long().argmax())
        if unused:
            self._mask = self._mask[:, unused:]
            for layer in self._cache.layers:
                layer.forget(unused)


def _logits(network: Any, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> Tensor:
    made = network(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    logits: Tensor = made.logits[:, -1].float()
    return logits


def left_padded(prompts: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return ids and mask, int64 [N, P] each, with the last token of each prompt in the last column."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad_id] * (longest - len(one)) + list(one) for one in prompts], device=device)
    lengths = torch.tensor([len(one) for one in prompts], device=device)
    return ids, (torch.arange(longest, device=device) >= longest - lengths[:, None]).long()


# ---- The backend.


class CachedGeneration:
    """Generates with a key-value cache and the model's current weights."""

    def __init__(self, model: Any, *, end_ids: Sequence[int], pad_id: int) -> None:
        """model: any causal language model of transformers, with or without an adapter.

        end_ids: tokens of which each ends a response.
        """
        self._model, self._pad = model, pad_id
        self._device: torch.device = model.device
        self._ends = torch.tensor(list(end_ids), device=self._device)
        self._random = torch.Generator(self._device)

    def seed(self, seed: int) -> None:
        """Seed the draws: equal seeds give equal draws in every backend."""
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
        """Return responses of at most `most` tokens to prompts, none of which is empty.

        deterministic: take the most likely token. is_over: called before each token; True ends all responses.
        on_token: called after each token.
        """
        distinct = {tuple(prompt): number for number, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
        prompt_of = torch.tensor([distinct[tuple(prompt)] for prompt in prompts], device=self._device)
        batch = RunningBatch(self._pad, self._device)
        rows = torch.arange(len(prompts), device=self._device)
        alive = torch.ones(len(prompts), dtype=torch.bool, device=self._device)
        tokens = torch.full((len(prompts), most), self._pad, device=self._device)
        log_prob = torch.zeros((len(prompts), most), device=self._device)
        lengths = torch.full((len(prompts),), most, device=self._device)
        ended = torch.zeros(len(prompts), dtype=torch.bool, device=self._device)
        step, left, newest = 0, len(prompts), None
        while step < most and left and not is_over():
            if newest is None:
                logits = batch.join(self._model, list(distinct))[prompt_of]
                batch.select(prompt_of)
            else:
                logits = batch.forward(self._model, newest)
            log_probs = torch.log_softmax(logits, -1)
            newest = self._draw(log_probs, deterministic=deterministic)
            tokens[rows, step] = torch.where(alive, newest, self._pad)
            log_prob[rows, step] = log_probs.gather(1, newest[:, None])[:, 0] * alive
            step += 1
            done = alive & torch.isin(newest, self._ends)
            lengths[rows[done]] = step
            ended[rows[done]] = True
            alive = alive & ~done
            left = int(alive.sum())
            if 0 < left <= len(rows) // 2:
                kept = alive.nonzero()[:, 0]
                batch.select(kept)
                rows, alive, newest = rows[kept], alive[kept], newest[kept]
            on_token()
        lengths.clamp_(max=step)
        arrays = (tokens[:, :step], log_prob[:, :step], lengths, ended, ended | (step == most))
        return Generated(*(array.cpu().numpy() for array in arrays))

    def _draw(self, log_probs: Tensor, *, deterministic: bool) -> Tensor:
        if deterministic:
            return log_probs.argmax(-1)
        # One random number for each row; `multinomial` takes one for each token of the vocabulary.
        uniform = torch.rand(
            len(log_probs), generator=self._random, dtype=torch.float64, device=log_probs.device
        )
        return draw(log_probs, uniform)


def device_of(name: str) -> str:
    """Return a device as torch names it. name: that of one, or "auto": a GPU where there is one."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def make_backend(policy: Any, tokenizer: Tokenizer, device: str) -> CachedGeneration:
    """Return the backend that generates with a `LanguagePolicy`, whose network moves to the device.

    device: as torch names it, or "auto": a GPU where there is one.
    """
    policy.to(device_of(device))
    return CachedGeneration(policy.network, end_ids=end_ids(tokenizer), pad_id=tokenizer.pad_token_id)
