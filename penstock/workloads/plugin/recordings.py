"""Recordings for `penstock train --from`: read, or written from experience of other sources than actors.

Recording         reads a recording
RecordingWriter   writes a recording, fragment by fragment
FragmentBuilder   collects steps of N slots and cuts them into fragments
Stepped, Ended    one step of N slots, and the episodes that ended in it
HeaderFields      fields of a fragment's header
single_rank       the group of a single learner process, for `make_step_model`
"""

from penstock.actor.acting.stepper import Ended, Stepped
from penstock.actor.rollout.generator import FragmentBuilder, HeaderFields
from penstock.learner.algorithms.rows import RankGroup
from penstock.learner.feed.recorded_feed import Recording
from penstock.learner.feed.recording import RecordingWriter

__all__ = [
    "Ended",
    "FragmentBuilder",
    "HeaderFields",
    "Recording",
    "RecordingWriter",
    "Stepped",
    "single_rank",
]

single_rank = RankGroup
