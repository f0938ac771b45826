"""Seconds of training: from the first experience on, over all processes of a run.

The clock is stopped after the last update. So waiting for the last evaluation is not training: neither in the
account of a process nor in the checkpoint that the next one goes on from.
"""

import time


class TrainingClock:
    """Counts seconds from `start` on. before: seconds of the processes before this one."""

    def __init__(self, before: float = 0.0) -> None:
        self._before = before
        self._since: float | None = None
        self._stopped: float | None = None

    def start(self, created_us: int) -> None:
        """Begin when the first experience was made, by its own clock where that is plausible."""
        if self._since is not None:
            return
        age = time.time() - created_us / 1e6
        plausible = created_us > 0 and not self._before and 0 <= age < 60
        self._since = time.monotonic() - (age if plausible else 0.0)

    def stop(self) -> None:
        """End the training: `seconds` stays as it is."""
        self._stopped = self.elapsed()

    def seconds(self) -> float:
        """Return the seconds of training until now, or until `stop`."""
        return self.elapsed() if self._stopped is None else self._stopped

    def elapsed(self) -> float:
        """Return the seconds until now, with those that follow the training."""
        return self._before + (0.0 if self._since is None else time.monotonic() - self._since)
