"""The algorithm of each `algorithm.name`, and the hardware that it can use."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final, Protocol

import torch

from penstock.config.settings import AlgorithmSection, ConfigurationError, RandomSection, Settings
from penstock.learner.algorithms.algorithm import EMPTY, Algorithm, AlgorithmState, Settles, Trained, Update
from penstock.learner.algorithms.clone import Clone
from penstock.learner.algorithms.gradient import Hardware
from penstock.learner.algorithms.off_policy.dqn import DQN
from penstock.learner.algorithms.off_policy.sac import SAC
from penstock.learner.algorithms.ppo import PPO, Impala, Reinforce
from penstock.learner.batch import Batch
from penstock.policy.policy import Policy

# ---- Acting at random: a baseline, which learns nothing.
#
# Choices are uniform; numbers are drawn around 0 with the initial deviations of the policy.

METRICS = ()
"""There are none."""


class RandomActions(Trained):
    """Owns the policy's weights, and sets those of its actor head to 0."""

    settles = Settles.ON_INSERT
    needed = ("updates",)

    def __init__(self, policy: Policy, section: RandomSection, *, seed: int) -> None:
        del seed
        self.policy, self.section, self.modules = policy, section, {"policy": policy}
        with torch.no_grad():
            for parameter in policy.actor_head.parameters():
                parameter.zero_()

    def budget(self, fragment_charge: int) -> int:
        return 2 * max(self.section.batch_steps, fragment_charge)

    def makes_batch(self, fragments: int, charge: int) -> bool:
        return charge >= self.section.batch_steps

    def update(self, batch: Batch, *, progress: float) -> Update:
        steps = int(batch.valid.sum())
        self._updates += bool(steps)
        reason = "" if steps else EMPTY
        return Update(applied=bool(steps), reason=reason, steps=steps, publish=False, collects=True)

    def restore(self, state: AlgorithmState) -> None:
        self._load_learned(state)


Maker = Callable[..., Algorithm]
"""Makes an algorithm of a policy, its section, and the `seed` of its random numbers."""


class HardwareMaker(Protocol):
    """Makes an algorithm that can use several ranks, mixed precision or compilation, or one of a workload."""

    def __call__(self, policy: Any, section: Any, *, seed: int, hardware: Hardware) -> Algorithm:
        """Return the algorithm.

        policy: on its device. section: settings of the algorithm. seed: of its random numbers.
        hardware: ranks, precision and compilation, which the section's class allows.
        """
        ...


# An algorithm that takes `hardware` belongs to ON_HARDWARE, another to ALONE, whatever its section allows.
ON_HARDWARE: Final[Mapping[str, HardwareMaker]] = {"ppo": PPO, "impala": Impala, "reinforce": Reinforce}
ALONE: Final[Mapping[str, Maker]] = {"clone": Clone, "dqn": DQN, "random": RandomActions, "sac": SAC}
ALGORITHMS: Final[Mapping[str, Maker]] = {**ALONE, **ON_HARDWARE}
"""The core's algorithms, made with a policy, a section and a seed for float32 on one rank."""


def choose(
    algorithms: Mapping[str, HardwareMaker],
    policy: Any,
    section: AlgorithmSection,
    *,
    seed: int,
    hardware: Hardware,
    learns: str,
) -> Algorithm:
    """Return the algorithm that a section names, made for a policy.

    Args:
        algorithms: all that the workload can be learned by, by `algorithm.name`.
        policy: on its device.
        section: of the settings.
        seed: of the algorithm's random numbers.
        hardware: of `hardware_of`; call `check_hardware` first.
        learns: what the workload does, for the message, such as "writes tokens".

    Raises:
        ConfigurationError: the section is of another algorithm; lists the names.
    """
    if section.name not in algorithms:
        _refuse(
            f"algorithm.name={section.name!r}: does not learn what this workload does, which {learns}",
            f"use {' or '.join(sorted(algorithms))}",
        )
    return algorithms[section.name](policy, section, seed=seed, hardware=hardware)


def make(
    policy: Policy,
    section: AlgorithmSection,
    *,
    seed: int,
    hardware: Hardware,
    own: Mapping[str, HardwareMaker] = MappingProxyType({}),
) -> Algorithm:
    """Return an algorithm for single steps, see `choose`. own: algorithms of the workload, by name."""
    alone = {name: partial(_make_alone, maker) for name, maker in ALONE.items()}
    known: dict[str, HardwareMaker] = {**alone, **ON_HARDWARE, **own}
    return choose(known, policy, section, seed=seed, hardware=hardware, learns="acts step by step")


def _make_alone(maker: Maker, policy: Policy, section: Any, *, seed: int, hardware: Hardware) -> Algorithm:
    """Make an algorithm for one rank in float32; `check_hardware` has refused settings of other hardware."""
    del hardware
    return maker(policy, section, seed=seed)


def check_hardware(settings: Settings, ranks: int) -> None:
    """Raise ConfigurationError for settings that do not work with this many ranks or such networks."""
    if ranks > 1:
        _check_ranks(settings, ranks)
    compiled = settings.learner.compile
    if compiled or settings.learner.precision != "float32":
        _check_networks(settings, compiled=compiled)


def _check_networks(settings: Settings, *, compiled: bool) -> None:
    asked_for = "learner.compile=true" if compiled else f"learner.precision={settings.learner.precision!r}"
    section = settings.algorithm
    able = section.can_compile if compiled else section.can_round
    if section.name in ALONE or not able:
        cause = f"algorithm.name={section.name!r} has none of it"
        _refuse(f"{asked_for}: {cause}", f"leave it at its default, or use {_known()}")
    if settings.policy.recurrent != "none":
        cause = f"not for the recurrent core of policy.recurrent={settings.policy.recurrent!r}"
        _refuse(f"{asked_for}: {cause}", "leave it at its default, or policy.recurrent='none'")
    if compiled and settings.policy.dropout:
        cause = f"the compiler cannot draw what policy.dropout={settings.policy.dropout} drops"
        _refuse(f"learner.compile=true: {cause}", "leave it at false, or policy.dropout=0")


def _check_ranks(settings: Settings, size: int) -> None:
    policy, learner = settings.policy, settings.learner
    if settings.algorithm.name in ALONE or not settings.algorithm.can_share:
        _refuse(
            f"algorithm.name={settings.algorithm.name!r}: runs on one rank only, and there are {size}",
            f"use {_known()}, or learner.ranks=1",
        )
    if policy.recurrent != "none":
        _refuse(
            f"policy.recurrent={policy.recurrent!r}: sequences are not divided among {size} ranks",
            "use policy.recurrent='none' (policy.frame_stack remembers too), or learner.ranks=1",
        )
    if learner.record is not None:
        _refuse(
            f"learner.record={str(learner.record)!r}: rank 0 of {size} sees a part of the experience",
            "use no recording, or learner.ranks=1",
        )
    if learner.feed_from is not None:
        _refuse(
            f"learner.feed_from={str(learner.feed_from)!r}: a recording is read by one rank, and there are "
            f"{size}",
            "use experience of actors, or learner.ranks=1",
        )


def _known() -> str:
    return " or ".join(sorted(ON_HARDWARE))


def _refuse(cause: str, remedy: str) -> None:
    raise ConfigurationError(f"{cause}; {remedy}")
