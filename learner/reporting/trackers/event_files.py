"""TensorBoard: event files under `tensorboard/` in the run's folder, one curve for each figure.

The axis is environment steps.
"""

from collections.abc import Mapping
from typing import Final

from torch.utils.tensorboard import SummaryWriter

from penstock.learner.reporting.trackers.tracker import TrackedRun

FOLDER: Final = "tensorboard"
_FLUSH_S: Final = 5


class EventFiles:
    """An open event file."""

    def __init__(self, writer: SummaryWriter) -> None:
        self._writer = writer

    def write(self, step: int, at: float, values: Mapping[str, float]) -> None:
        """Add a point to each curve."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=at)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


def open_tracker(place: TrackedRun) -> EventFiles:
    """Open a new file beside those of earlier learners.

    Their figures beyond the first step of this learner are not shown.
    """
    purge_step = place.first_step or None
    folder = str(place.run_dir / FOLDER)
    return EventFiles(SummaryWriter(folder, purge_step=purge_step, flush_secs=_FLUSH_S))
