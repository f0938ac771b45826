"""What comes around the reply of every script: the layout of the keys, and the incarnation of the run.

A run begins an incarnation, and another one whenever Redis has lost a part of it: restored from an older
snapshot, emptied, or emptied and filled anew. What a process remembers of one says nothing of the next.
"""

from collections.abc import Sequence
from typing import Any

from penstock.broker.log.script import LAYOUT


class OtherLayout(Exception):
    """The run in Redis has keys of another layout; the message names both and the remedy."""

    def __init__(self, layout: int) -> None:
        super().__init__(
            f"the run in Redis has layout {layout}, this release has layout {LAYOUT}: "
            "start brokers and learner of one release, the learner first"
        )
        self.is_earlier = layout < LAYOUT
        """A learner of this release brings it up to date."""


class OtherIncarnation(Exception):
    """The script did not run, because the caller knows another incarnation of the run.

    incarnation: the one that Redis holds; "" before a learner has opened it.
    """

    def __init__(self, incarnation: str) -> None:
        super().__init__("Redis holds another incarnation of the run than a moment ago: ask again")
        self.incarnation = incarnation


def unpack(answer: Sequence[Any]) -> tuple[str, Any]:
    """Return the incarnation and the script's own reply.

    Raises OtherLayout and OtherIncarnation where the script did not run.
    """
    layout, incarnation = int(answer[0]), bytes(answer[1]).decode()
    if len(answer) > 2:
        return incarnation, answer[2]
    if layout != LAYOUT:
        raise OtherLayout(layout)
    raise OtherIncarnation(incarnation)
