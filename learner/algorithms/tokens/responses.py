"""Responses of a batch: rows of tokens, those that were sampled flat, and cuts of them that fit into memory.

A column of a fragment is one response with its prompt before it, or a conversation, whose turns are apart by
what was not sampled: `valid` where a token was, one end, at the last of these. Where tokens lie is known on
the CPU, so that a minibatch asks no device for it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from penstock.learner.batch import Batch, send
from penstock.policy.tokens import TokenRows

Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """rows: what the policy reads.   index: int64 [m], which of the n sampled tokens they ask for."""

    rows: TokenRows
    index: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Responses:
    """R rows with n sampled tokens, those of a row behind one another.

    tokens: int64 [R, L], prompt and response, all but the last.   action, behaviour, reward: [n].
    cut_short: bool [R], its length ended it.   step: int64 [n], place in its row.
    update: int64 [R], update count of the oldest weights of the row.
    counts: int64 [R], sampled tokens.   lengths: int64 [R], tokens of `tokens` up to the last sampled action.
    left_out: columns that are no whole response.
    """

    tokens: Tensor
    action: Tensor
    behaviour: Tensor
    reward: Tensor
    cut_short: Tensor
    update: Tensor
    step: Index
    counts: Index
    lengths: Index
    left_out: int

    def __len__(self) -> int:
        """Return the number of rows (R)."""
        return len(self.counts)

    @property
    def sampled(self) -> int:
        """Return the number of sampled tokens (n)."""
        return len(self.step)

    @property
    def last(self) -> Tensor:
        """Which of the n sampled tokens are the last of their row, int64 [R]."""
        return send(torch.from_numpy(np.cumsum(self.counts) - 1), self.tokens.device)

    @property
    def turn_ends(self) -> Tensor:
        """Return which sampled tokens end a turn that another turn of their row follows, bool [n]."""
        ends = np.append(self.step[1:] != self.step[:-1] + 1, True)
        ends[np.cumsum(self.counts) - 1] = False
        return send(torch.from_numpy(ends), self.tokens.device)

    def sampled_by(self, update: int) -> Tensor:
        """Return which sampled tokens are of rows that the weights of this update made alone, bool [n]."""
        counts = send(torch.from_numpy(self.counts), self.tokens.device)
        return (self.update == update).repeat_interleave(counts, output_size=self.sampled)

    def prompts(self) -> Tensor:
        """A number for each row, equal for equal prompts, int64 [R]."""
        first = self.step[np.cumsum(self.counts) - self.counts]
        ends = send(torch.from_numpy(first), self.tokens.device)
        places = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        prompts = self.tokens.masked_fill(places > ends.unsqueeze(1), -1)
        numbers: Tensor = torch.unique(prompts, dim=0, return_inverse=True)[1]
        return numbers

    def fit_at_once(self, most_places: int) -> bool:
        """Return whether all rows are one micro-batch."""
        return len(self) * int(self.lengths.max()) <= most_places

    def micro_batches(self, rows: Index, most_places: int) -> Iterator[MicroBatch]:
        """These rows, those of similar length together, in parts of at most so many places.

        A longer row is one alone.
        """
        for part in _parts(rows[np.argsort(self.lengths[rows], kind="stable")], self.lengths, most_places):
            yield self._micro_batch(part)

    def behind(self, rows: Index, most_places: int) -> Iterator[MicroBatch]:
        """These rows with their last sampled token, which one place asks behind; `index`: of the R rows."""
        for part in _parts(
            rows[np.argsort(self.lengths[rows], kind="stable")], self.lengths + 1, most_places
        ):
            longest, device = int(self.lengths[part].max()) + 1, self.tokens.device
            ends, on_device = (send(torch.from_numpy(one), device) for one in (self.lengths[part], part))
            tokens = functional.pad(self.tokens.index_select(0, on_device), (0, 1))[:, :longest]
            tokens[torch.arange(len(part), device=device), ends] = self.action[self.last[on_device]]
            places = torch.arange(longest, device=device)
            yield MicroBatch(
                TokenRows(
                    tokens=tokens,
                    present=places <= ends[:, None],
                    place=torch.arange(len(part), device=device) * longest + ends,
                    action=torch.zeros_like(on_device),
                ),
                on_device,
            )

    def _micro_batch(self, rows: Index) -> MicroBatch:
        counts, lengths, longest = self.counts[rows], self.lengths[rows], int(self.lengths[rows].max())
        first = np.cumsum(self.counts) - self.counts
        index = np.repeat(first[rows] - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
        place = np.repeat(np.arange(len(rows)) * longest, counts) + self.step[index]
        present = np.arange(longest) < lengths[:, None]
        device = self.tokens.device
        on_device = send(torch.from_numpy(index), device)
        return MicroBatch(
            TokenRows(
                tokens=self.tokens.index_select(0, send(torch.from_numpy(rows), device))[:, :longest],
                present=send(torch.from_numpy(present), device),
                place=send(torch.from_numpy(place), device),
                action=self.action.index_select(0, on_device),
            ),
            on_device,
        )


class Grid:
    """Sampled tokens [n] as [S, R]: token s of response r, without what lies between them; and back."""

    def __init__(self, responses: Responses) -> None:
        counts, device = responses.counts, responses.tokens.device
        row = np.repeat(np.arange(len(counts)), counts)
        nth = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        place = nth * len(counts) + row
        self._place = send(torch.from_numpy(place), device)
        self._shape = (int(counts.max()), len(counts))
        rows = np.arange(self._shape[0])[:, None]
        self.sampled = send(torch.from_numpy(rows < counts), device)
        """Bool [S, R]."""

    def spread(self, flat: Tensor) -> Tensor:
        """[n] → [S, R], 0 elsewhere."""
        room = flat.new_zeros(self._shape[0] * self._shape[1])
        return room.index_copy(0, self._place, flat).view(self._shape)

    def gather(self, grid: Tensor) -> Tensor:
        """Inverse of `spread`."""
        return grid.flatten().index_select(0, self._place)


def read_responses(batch: Batch) -> Responses | None:
    """The whole responses of a batch, or None where there is none. Reads the device once."""
    ended = batch.terminated | batch.truncated
    host = torch.stack([batch.valid, ended, batch.truncated & ~batch.terminated]).cpu().numpy()
    valid, ends, cut_short = host.transpose(0, 2, 1)
    kept, last = _whole(valid, ends)
    if not len(kept):
        return None
    row, step = valid[kept].nonzero()
    device = batch.valid.device
    columns = send(torch.from_numpy(kept), device)
    place = send(torch.from_numpy(step * valid.shape[0] + kept[row]), device)
    return Responses(
        tokens=batch.observation["observation"][:-1].t().index_select(0, columns).long(),
        action=batch.action["action"].flatten().index_select(0, place).long(),
        behaviour=batch.log_prob.flatten().index_select(0, place),
        reward=batch.reward.flatten().index_select(0, place),
        cut_short=send(torch.from_numpy(cut_short[kept, last[kept]]), device),
        update=batch.update.to(device).index_select(0, columns),
        step=step,
        counts=np.bincount(row, minlength=len(kept)),
        lengths=last[kept] + 1,
        left_out=int(valid.any(1).sum()) - len(kept),
    )


def _whole(valid: NDArray[np.bool_], ends: NDArray[np.bool_]) -> tuple[Index, Index]:
    """Columns [B, T] with one end, at the last sampled token; and where that is, [B]."""
    last = valid.shape[1] - 1 - np.argmax(valid[:, ::-1], 1)
    at_last = np.take_along_axis(ends, last[:, None], 1)[:, 0]
    return (valid.any(1) & at_last & (ends.sum(1) == 1)).nonzero()[0], last


def _parts(order: Index, lengths: Index, most_places: int) -> Iterator[Index]:
    """Consecutive parts of `order`, by rising length, whose padded size stays within the limit."""
    start = 0
    for end in range(1, len(order) + 1):
        is_last = end == len(order)
        if is_last or (end + 1 - start) * lengths[order[end]] > most_places:
            yield order[start:end]
            start = end
