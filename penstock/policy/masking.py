"""Action masks: the outputs of a policy that an observation rules out.

A mask lies beside its observation as `mask/ACTION/PATH`, bool, true where allowed
(`penstock.protocol.schema.mask_rules`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.protocol.schema import choices
from penstock.protocol.spaces import Space, leaves


class ActionMasks:
    """Masks of an action space whose leaves' outputs lie in `cuts` of P."""

    def __init__(self, action_space: Space, cuts: Sequence[slice]) -> None:
        parts = zip(leaves(action_space, "action"), cuts, strict=True)
        self._parts = [(path, f"mask/{path}", cut) for (path, leaf), cut in parts if choices(leaf)]
        self._width = cuts[-1].stop

    def given(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the masks in a row, by the path of their action."""
        return {path: row[name] for path, name, _ in self._parts if name in row}

    def forbidden(self, observation: Mapping[str, Tensor], rows: Tensor) -> Tensor | None:
        """Return what the masks [..., n] of an observation rule out of M = len(rows), bool [M, P].

        None: no masks.

        Rows behind those that have masks are free.
        """
        given = self.given(observation)
        if not given:
            return None
        forbidden = torch.zeros((len(rows), self._width), dtype=torch.bool, device=rows.device)
        for path, _, cut in self._parts:
            if path in given:
                allowed = given[path].reshape(-1, cut.stop - cut.start)
                forbidden[: len(allowed), cut] = ~allowed
        return forbidden


def masked(parameters: Tensor, forbidden: Tensor | None) -> Tensor:
    """Return parameters [M, P] that leave what is `forbidden` (bool [M, P]) no probability.

    Forbidden logits become the lowest finite number: its exponential is 0 beside any other, while
    log-probability, entropy and their gradients stay finite, as they do not with minus infinity.
    """
    if forbidden is None:
        return parameters
    return parameters.masked_fill(forbidden, torch.finfo(parameters.dtype).min)
