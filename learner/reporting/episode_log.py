"""`episodes.jsonl` of a run's folder: a line for each training episode, as actors report them.

The file is bounded: a full one becomes `episodes.1.jsonl`, in place of the one before it. A learner that goes
on from a checkpoint reads some reports again: of two lines with one number the later counts.
"""

import json
import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from penstock.protocol.messages import Episode

EPISODES: Final = "episodes.jsonl"
BEFORE: Final = "episodes.1.jsonl"
MOST_BYTES: Final = 64 * 2**20

log = logging.getLogger(__name__)


class EpisodeLog:
    """Appends to the file of one run. What the disk does not take is lost, and said once."""

    def __init__(self, run_dir: Path, most_bytes: int = MOST_BYTES) -> None:
        self._file, self._before = run_dir / EPISODES, run_dir / BEFORE
        self._most, self._fails = most_bytes, False

    def add(self, first: int, episodes: Iterable[Episode]) -> None:
        """Add episodes. first: number of the first of them in the run, from 1."""
        now = round(time.time(), 3)
        text = "".join(
            json.dumps(
                {
                    "episode": number,
                    "time": now,
                    "return": episode.episode_return,
                    "length": episode.length,
                    "terminated": episode.terminated,
                    "version": episode.version,
                }
            )
            + "\n"
            for number, episode in enumerate(episodes, first)
        )
        try:
            with self._file.open("a") as file:
                file.write(text)
                is_full = file.tell() > self._most
            if is_full:
                self._file.replace(self._before)
        except OSError as error:
            if not self._fails:
                log.warning("episodes are not written", extra={"why": str(error)})
            self._fails = True
