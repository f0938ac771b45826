"""TensorBoard: event files under `tensorboard/` in the run's folder, one curve for each figure, over environment steps."""

from collections.abc import Mapping
from typing import Final

from torch.utils.tensorboard import SummaryWriter

from learner.reporting.trackers.tracker import Place

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


def open_tracker(place: Place) -> EventFiles:
    """A new file beside those of learners before.

    Of what they did beyond the first step here nothing is shown.
    """
    purge_step = place.first_step or None
    folder = str(place.run_dir / FOLDER)
    return EventFiles(SummaryWriter(folder, purge_step=purge_step, flush_secs=_FLUSH_S))
