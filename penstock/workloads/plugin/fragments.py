"""Cutting generated experience into fragments. Loads no torch.

    HeaderFields      fields of a fragment's header; its `header` makes a `FragmentHeader`
    Episodes          the episode of each of N slots, with its running return and length
    Ends              the slots that ended an episode in a fragment, and the rows
    learner_reward    the wrappers of `environment.reward` as a `LearnerReward`, None where a section has none
    make              a header and tensors as a `Fragment`; the header's table of tensors is made from them

A fragment has T rows of N slots. A generator without environments fills the tensors that the run's schema
names, [T, N, …], observations [T + 1, N, …] and those of K ended episodes [K, …], counts the episodes with
`Episodes`, and calls `make` with header and tensors.
"""

from penstock.actor.acting.masks import LearnerReward, learner_reward
from penstock.actor.rollout.generator import Ends, Episodes, HeaderFields
from penstock.protocol.fragment import build as make

__all__ = ["Ends", "Episodes", "HeaderFields", "LearnerReward", "learner_reward", "make"]
