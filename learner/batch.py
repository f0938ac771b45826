"""Fragments side by side as one batch of tensors [T, B]; ragged ones are padded with `valid` False."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.wire.fragment import FragmentHeader
from penstock.wire.tensor import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """T: longest unroll in it. B: slots of all its fragments, in order. K: ended episodes.

    observation: by path, [T+1, B, *shape], raw.   action: by path, [T, B, *shape], as drawn.
    reward, log_prob: float32 [T, B], 0 where not valid.   terminated, truncated, valid: bool [T, B].
    final_observation: by path, [K, *shape]: the true last observation of the episode that ended in
        column final_slot[k] (int64, of this batch) with step final_step[k] (int64).
    update: int64 [B], update count of the oldest weights of the column.
    slots: (session, slot id) of each column, to follow an environment across batches.
    """

    observation: dict[str, Tensor]
    action: dict[str, Tensor]
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    valid: Tensor
    log_prob: Tensor
    final_observation: dict[str, Tensor]
    final_slot: Tensor
    final_step: Tensor
    update: Tensor
    slots: tuple[tuple[int, int], ...]


def assemble(fragments: Sequence[tuple[FragmentHeader, Mapping[str, Array]]], device: torch.device) -> Batch:
    """One batch of checked fragments (`penstock.wire.fragment.check`), on `device`.

    Raises ValueError for no fragments. Call `check_meaning` on each fragment first.
    """
    raise NotImplementedError


def check_meaning(header: FragmentHeader, arrays: Mapping[str, Array]) -> None:
    """Raise ValueError that says why when a well-formed fragment cannot be trained on.

    That is: a truncated step without its final observation, a final row that points outside or at a step
    that did not end, a `reward`, `log_prob` or floating observation or action that is not finite where valid.
    The caller books `invalid`.
    """
    raise NotImplementedError
