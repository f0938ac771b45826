"""Cutting generated experience into fragments. Loads no torch.

    HeaderFields      what a fragment's header says beside its content; its `header` makes a `FragmentHeader`
    Episodes          which episode each of N slots is in, with its running return and length
    Ends              which slots ended an episode in a fragment, and at which row
    learner_reward    the wrappers of `environment.reward` as a `LearnerReward`, None where a section has none
    make              a header and tensors as a `Fragment`; the header's table of tensors is made from them

A fragment has T rows of N slots. A generator whose steps are not those of environments fills the tensors that
the run's schema names, [T, N, …], observations [T + 1, N, …] and what ends with an episode [K, …], has
`Episodes` count them, and hands header and tensors to `make`.
"""

from penstock.actor.acting.masks import LearnerReward, learner_reward
from penstock.actor.rollout.generator import Ends, Episodes, HeaderFields
from penstock.protocol.fragment import build as make

__all__ = ["Ends", "Episodes", "HeaderFields", "LearnerReward", "learner_reward", "make"]
