"""How batches reach the device: on a CPU they are there; to a GPU they are copied while it computes.

The feed's thread fills pinned memory and starts the copies on a stream of their own; the loop's thread has
its stream wait for them where it takes the batch. Neither thread waits for the GPU:

    feed's thread   assemble in pinned memory → copy (side stream) → event
    loop's thread   arrive: its stream waits for the event → update

Pinned memory comes from torch's own cache, which gives a block out again only when the copy out of it is
done; `record_stream` does the same for the memory on the GPU that the side stream allocated.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch import Tensor

from penstock.learner.batch import Batch


@dataclass(frozen=True, slots=True)
class Staged:
    """A batch that may still be on its way. arrive: call it in the thread that uses the batch, before."""

    batch: Batch
    arrive: Callable[[], None]


class Upload(Protocol):
    """`stage` from one thread."""

    @property
    def device(self) -> torch.device:
        """Where batches go."""
        ...

    def stage(self, assemble: Callable[[], Batch]) -> Staged:
        """Have a batch assembled for the device."""
        ...


class InPlace:
    """For the CPU: a batch is where it is used."""

    device = torch.device("cpu")

    def stage(self, assemble: Callable[[], Batch]) -> Staged:
        """Return the batch as it was assembled."""
        return Staged(assemble(), in_place)


class SideStream:
    """For a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)

    def stage(self, assemble: Callable[[], Batch]) -> Staged:
        """Return the batch in pinned memory, with its copies to the device under way."""
        with torch.cuda.stream(self._stream):
            batch = assemble()
            copied = self._stream.record_event()

        def arrive() -> None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(copied)
            for tensor in tensors(batch):
                tensor.record_stream(current)

        return Staged(batch, arrive)


def upload_to(device: torch.device) -> Upload:
    """Return how batches get there."""
    return SideStream(device) if device.type == "cuda" else InPlace()


def tensors(batch: Batch) -> Iterator[Tensor]:
    """Every tensor of a batch."""
    for field in fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            yield from value.values()


def in_place() -> None:
    """Do nothing: what is there need not arrive."""
