"""Rewards from a Python function: `module:function` takes (prompts, responses) and returns a list.

    def shorter(prompts: list[Prompt], responses: list[str]) -> list[float | None]:
        return [-len(response) / 100 for response in responses]

Only configuration of this machine names such a function: what comes over the wire imports nothing.
"""

import hashlib
import inspect
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from penstock.config.workload import load
from penstock.workloads.language.prompt import Prompt
from penstock.workloads.language.reward.reward_source import BadReward, Rewards, Sample, ScoredBy, checked

Function = Callable[[list[Prompt], list[str]], Sequence[float | None]]


class CallableRewards:
    """Asks a function of the user's for rewards.

    Calls of several threads take turns: the function need not be safe for threads.
    """

    def __init__(self, path: str) -> None:
        """Raises ConfigurationError for a path that leads to no function."""
        self._function: Function = load(path)
        self._by = ScoredBy(name=path, sha256=_sha256(self._function))
        self._turn = threading.Lock()

    def score(self, samples: Sequence[Sample]) -> Rewards:
        """Return their rewards; raises BadReward, and what the function raises."""
        prompts = [sample.prompt for sample in samples]
        responses = [sample.response for sample in samples]
        with self._turn:
            values = self._function(prompts, responses)
        return Rewards(checked(_listed(values, self._by.name), len(samples), self._by.name), self._by)

    def close(self) -> None:
        """Do nothing: nothing is held."""


def _listed(values: Any, whose: str) -> list[Any]:
    """Also of arrays and tensors: their elements as Python numbers."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise BadReward(
            f"{whose}: returned {type(values).__name__}: return a list with a reward for each response"
        )
    return list(values)


def _sha256(function: Any) -> str:
    """Of the file that it stands in."""
    try:
        file = inspect.getsourcefile(function)
    except TypeError:
        file = None
    return "" if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()
