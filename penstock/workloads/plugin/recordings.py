"""Recordings: read, or made of experience that no actor generated, for `penstock train --from`.

Recording         reads a recording
RecordingWriter   writes a recording, fragment by fragment
FragmentBuilder   collects steps of N slots and cuts them into fragments
Stepped, Ended    one step of N slots, and the episodes that ended in it
HeaderFields      what a fragment's header says beside its content
single_rank       the group of a process that learns alone, as `make_step_model` takes it
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
