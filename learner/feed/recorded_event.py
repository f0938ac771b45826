"""What an operator made a learner do between two batches, as a recording holds it."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RecordedEvent:
    """A named checkpoint that was made or restored. command: number of the operator's command."""

    action: Literal["checkpoint", "restore"]
    name: str
    command: int
