"""Cutting generated experience into fragments. Loads no torch.

    HeaderFields      what a fragment's header says beside its content; its `header` makes a `FragmentHeader`
    Episodes          which episode each of N slots is in, with its running return and length
    Ends              which slots ended an episode in a fragment, and at which row
    learner_reward    the wrappers of `environment.reward` as a `LearnerReward`, None where a section has none
    make              a header and tensors as a `Fragment`

A fragment has T rows of N slots. A generator whose steps are not those of environments fills the tensors that
the run's schema names, has `Episodes` count them, and hands header and tensors to `make`.
"""

from collections.abc import Collection, Mapping

from penstock.actor.acting.local_policy import HeaderFields
from penstock.actor.acting.masks import LearnerReward, learner_reward
from penstock.actor.rollout.episode_tracker import Ends, Episodes
from penstock.protocol.fragment import Fragment, FragmentHeader, build
from penstock.protocol.tensor import Array

__all__ = ["Ends", "Episodes", "HeaderFields", "LearnerReward", "learner_reward", "make"]


def make(header: FragmentHeader, tensors: Mapping[str, Array], compress: Collection[str] = ()) -> Fragment:
    """Return the fragment of a header and its tensors.

    header: as `HeaderFields.header` makes it; its table of tensors is replaced by that of what is packed.
    tensors: by the names of the run's schema, each with its shape and dtype: [T, N, …], observations [T + 1,
    N, …],
        what ends with an episode [K, …].
    compress: names of tensors that are stored as lz4 frames.
    """
    return build(header, tensors, compress)
