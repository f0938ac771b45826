"""A conversation of two turns, one that was cut, and a prompt without an answer, over twelve tokens."""

from penstock.workloads.language.conversation import Column, SampledTurn


def turn(start: int, *log_prob: float, reward: float = 0.0, version: int = 3) -> SampledTurn:
    """Of weights one update behind their version."""
    return SampledTurn(start=start, log_prob=log_prob, version=version, update=version - 1, reward=reward)


TWO = Column(ids=(5, 8, 6, 9, 2, 5, 10, 6, 11), turns=(turn(3, -1, -2, reward=0.5), turn(8, -3, reward=1.0)))
CUT = Column(ids=(5, 6, 9), turns=(turn(2, -4, reward=-1.0, version=4),), terminated=False)
NONE = Column(ids=(5, 6))
