"""Which object learns for which `algorithm.name`."""

from collections.abc import Mapping
from typing import Any, Final, Protocol

from learner.algorithm import Algorithm
from learner.algorithms.clone import Clone
from learner.algorithms.dqn import DQN
from learner.algorithms.impala import Impala
from learner.algorithms.ppo import PPO
from learner.algorithms.reinforce import Reinforce
from learner.algorithms.sac import SAC
from penstock.policy.policy import Policy


class Maker(Protocol):
    """Makes an algorithm of a policy and the section of the algorithm's own kind."""

    def __call__(self, policy: Policy, section: Any, *, seed: int) -> Algorithm:
        """seed: of all that the algorithm draws."""
        ...


ALGORITHMS: Final[Mapping[str, Maker]] = {
    "ppo": PPO,
    "impala": Impala,
    "reinforce": Reinforce,
    "clone": Clone,
    "dqn": DQN,
    "sac": SAC,
}
