"""What is written once for torch's tensors and numpy's arrays: in operators and names that both have.

For a few hundred numbers a call takes numpy a third of torch's time; tensors are for GPUs and graphs.
"""

from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch

Numbers: TypeAlias = Any
"""A tensor, or an array: one function is given, and gives back, only one kind."""


def names_of(numbers: Numbers) -> ModuleType:
    """Return torch for a tensor and numpy for an array, of any shape and dtype."""
    return torch if isinstance(numbers, torch.Tensor) else np
