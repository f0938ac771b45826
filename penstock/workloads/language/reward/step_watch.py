"""Watches the training of a reward model step by step, and ends it early."""

import time
from typing import Any

from transformers import TrainerCallback


class StepWatch(TrainerCallback):  # type: ignore[misc]  # transformers comes without types
    """Notes when steps end, and ends the training after `most` of them, or in time.

    least, within_s: so many seconds after the first step began the training ends, too, with at least so many.
    at_s: when the first step began and each ended. steps: of the whole training.
    """

    def __init__(self, most: int, *, least: int, within_s: float) -> None:
        self._most, self._least, self._within_s = most, least, within_s
        self.at_s: list[float] = []
        self.steps = 0

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **_others: Any) -> None:
        """Called by the Trainer."""
        self.steps = state.max_steps

    def on_step_begin(self, _args: Any, _state: Any, _control: Any, **_others: Any) -> None:
        """Called by the Trainer."""
        if not self.at_s:
            self.at_s.append(time.monotonic())

    def on_step_end(self, _args: Any, state: Any, control: Any, **_others: Any) -> None:
        """Called by the Trainer."""
        self.at_s.append(time.monotonic())
        is_late = state.global_step >= self._least and self.at_s[-1] - self.at_s[0] >= self._within_s
        if is_late or state.global_step >= self._most:
            control.should_training_stop = True
