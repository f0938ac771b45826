"""A token policy under training.

It has forward passes in micro-batches, gradients that add up over them, and optimisers.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from penstock.learner.algorithms.fast.optimiser import Backup, FlatAdam
from penstock.learner.algorithms.shared.schedule import Hardware
from penstock.learner.algorithms.tokens.responses import Index, MicroBatch, Responses
from penstock.policy.tokens import TokenOutputs, TokenPolicy, TokenRows

POLICY: Final = "policy"
CRITIC: Final = "critic"


@dataclass(frozen=True, slots=True)
class Pass:
    """A micro-batch and what the policy says of it."""

    part: MicroBatch
    outputs: TokenOutputs


class TokenNetwork:
    """Policy and critic have an optimiser each.

    Their step sizes differ, and the gradient of one never scales the other down.

    In mixed precision (autocast) matrix products are in bfloat16; what is trained and what comes out here is
    float32.
    """

    def __init__(self, policy: TokenPolicy, epsilon: float, hardware: Hardware) -> None:
        self.policy = policy
        self.optimisers = {
            POLICY: FlatAdam(policy.trained(), epsilon),
            CRITIC: FlatAdam(policy.critic, epsilon),
        }
        self.device = self.optimisers[POLICY].parameters.device
        self._precision = torch.autocast(self.device.type, torch.bfloat16, enabled=hardware.bfloat16)

    def outputs(self, rows: TokenRows) -> TokenOutputs:
        """`TokenPolicy.outputs`."""
        with self._precision:
            return self.policy.outputs(rows)

    def passes(self, responses: Responses, rows: Index, most_places: int) -> Iterator[Pass]:
        """Yield a forward pass for each micro-batch of these rows, when it is asked for.

        Differentiable where gradients are on.
        """
        for part in responses.micro_batches(rows, most_places):
            yield Pass(part, self.outputs(part.rows))

    def read(self, passes: Iterable[Pass], count: int, *, has_reference: bool) -> Tensor:
        """Return log π, entropy, V of all n sampled tokens, and with `has_reference` log π_ref.

        float32 [3 or 4, n].
        """
        read = torch.empty((4 if has_reference else 3, count), device=self.device)
        for one in passes:
            columns = [one.outputs.log_prob, one.outputs.entropy, one.outputs.value]
            if has_reference:
                with self._precision:
                    columns.append(self.policy.reference_log_prob(one.part.rows))
            read[:, one.part.index] = torch.stack([column.detach().float() for column in columns])
        return read

    def values_beyond(self, responses: Responses, most_places: int) -> Tensor:
        """Return V of what follows each row that was cut short, 0 for the others, float32 [R]."""
        values = torch.zeros(len(responses), device=self.device)
        cut = responses.cut_short.cpu().numpy().nonzero()[0]
        if len(cut):
            for part in responses.behind(cut, most_places):
                values[part.index] = self.outputs(part.rows).value.detach().float()
        return values

    def accumulate(self, names: Sequence[str], built: Sequence[Tensor], slopes: Sequence[Tensor]) -> None:
        """Add ∂loss/∂parameters of these optimisers to their flat gradients.

        slopes: ∂loss/∂built.
        """
        optimisers = [self.optimisers[name] for name in names]
        wanted = [own for optimiser in optimisers for own in optimiser.own]
        views = [view for optimiser in optimisers for view in optimiser.gradient_views]
        pieces = torch.autograd.grad(built, wanted, slopes, materialize_grads=True)
        for view, piece in zip(views, pieces, strict=True):
            view.add_(piece)

    def clear(self, names: Sequence[str]) -> None:
        """The sums begin at 0."""
        for name in names:
            self.optimisers[name].flat_gradient.zero_()

    def step(self, name: str, rate: float, max_norm: float) -> Tensor:
        """One step down the sum; its norm, see `FlatAdam.step`."""
        optimiser = self.optimisers[name]
        return optimiser.step(optimiser.flat_gradient, rate, max_norm)

    def checksum(self) -> Tensor:
        """Finite exactly when all that is trained is."""
        return torch.stack([optimiser.checksum() for optimiser in self.optimisers.values()]).sum()

    def backup(self) -> dict[str, Backup]:
        """A copy of all that steps change."""
        return {name: optimiser.backup() for name, optimiser in self.optimisers.items()}

    def restore(self, backup: dict[str, Backup]) -> None:
        """Back to a copy."""
        for name, optimiser in self.optimisers.items():
            optimiser.restore(backup[name])
