"""The reference backend: a causal language model of transformers, one token of all responses at a time.

    prompts, padded on the left ─► forward, keys and values kept ─► draw ─► forward of that token ─► draw ─► …

A prompt of several responses is read once. Once half of the responses have ended their rows leave the batch
and the cache, so that a long one does not keep all the others company.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from penstock.workloads.language.device import device_of
from penstock.workloads.language.generation.backend import Backend, Generated
from penstock.workloads.language.generation.drawing import draw
from penstock.workloads.language.generation.growing_cache import GrowingLayer
from penstock.workloads.language.tokenizer import Tokenizer


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
