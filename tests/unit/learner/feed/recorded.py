"""A small recording: fragments of the smallest run, in batches or without."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from penstock.learner.feed.recording import RecordingWriter
from penstock.protocol.fragment import Fragment
from tests.support.run.small_run import SLOTS, STEPS, fragment, specification

LARGE = 2**40


def numbered(sequence: int) -> Fragment:
    """Of eight valid steps whose reward is the sequence number."""
    shape = (STEPS, SLOTS)
    reward, valid = np.full(shape, sequence, np.float32), np.ones(shape, bool)
    return fragment(1, sequence, reward=reward, valid=valid)


def batch(position: int, sequences: Iterable[int], **over: object) -> dict[str, Any]:
    """Fragments of those sequences, consumed up to `position`."""
    fragments = [numbered(sequence) for sequence in sequences]
    given: dict[str, Any] = {"position": position, "update": position // 2, "of_round": None, "dropped": {}}
    return {"fragments": fragments, **given, **over}


def write(
    folder: Path, batches: Iterable[dict[str, Any]], *, max_bytes: int = LARGE, file_bytes: int = LARGE
) -> None:
    """A whole recording of a learner."""
    RecordingWriter.begin(folder, specification(), "learner", max_bytes).close()
    writer = RecordingWriter(folder, [], max_bytes, file_bytes)
    for one in batches:
        writer.consumed(**one)
    writer.close()
