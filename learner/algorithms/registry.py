"""Which object learns for which `algorithm.name`, and on what hardware it can."""

from collections.abc import Mapping
from typing import Any, Final, Protocol

from learner.algorithms.algorithm import Algorithm
from learner.algorithms.clone import Clone
from learner.algorithms.off_policy.dqn import DQN
from learner.algorithms.off_policy.sac import SAC
from learner.algorithms.on_policy.impala import Impala
from learner.algorithms.on_policy.ppo import PPO
from learner.algorithms.on_policy.reinforce import Reinforce
from learner.algorithms.shared.hardware import Hardware
from learner.algorithms.tokens.token_ppo import TokenPPO
from penstock.config.settings import AlgorithmSection, ConfigurationError, Settings
from penstock.policy.policy import Policy
from penstock.policy.tokens import TokenPolicy


class Maker(Protocol):
    """Makes an algorithm of a policy and the section of the algorithm's own kind."""

    def __call__(self, policy: Policy, section: Any, *, seed: int) -> Algorithm:
        """seed: of all that the algorithm draws."""
        ...


class TokenMaker(Protocol):
    """`HardwareMaker` of an algorithm that learns whole responses, token by token."""

    def __call__(
        self, policy: TokenPolicy, section: Any, *, seed: int, hardware: Hardware | None = None
    ) -> Algorithm:
        """hardware: of one rank; None: in float32."""
        ...


class HardwareMaker(Maker, Protocol):
    """`Maker` of an algorithm that shares its updates among ranks, compiles its networks and rounds them."""

    def __call__(
        self, policy: Policy, section: Any, *, seed: int, hardware: Hardware | None = None
    ) -> Algorithm:
        """hardware: None: this process alone, in float32, not compiled."""
        ...


ON_HARDWARE: Final[Mapping[str, HardwareMaker]] = {"ppo": PPO, "impala": Impala, "reinforce": Reinforce}
ALGORITHMS: Final[Mapping[str, Maker]] = {**ON_HARDWARE, "clone": Clone, "dqn": DQN, "sac": SAC}
OF_TOKENS: Final[Mapping[str, TokenMaker]] = {"token_ppo": TokenPPO}


def make(policy: Policy, section: AlgorithmSection, *, seed: int, hardware: Hardware) -> Algorithm:
    """What learns single steps by a section; ask `check_hardware` before. Raises ConfigurationError for one of tokens."""
    _check_kind(section, ALGORITHMS, "acts step by step")
    if section.name in ON_HARDWARE:
        return ON_HARDWARE[section.name](policy, section, seed=seed, hardware=hardware)
    return ALGORITHMS[section.name](policy, section, seed=seed)


def make_of_tokens(
    policy: TokenPolicy, section: AlgorithmSection, *, seed: int, hardware: Hardware
) -> Algorithm:
    """What learns responses by a section; ask `check_hardware` before. Raises ConfigurationError for one of steps."""
    _check_kind(section, OF_TOKENS, "writes tokens")
    return OF_TOKENS[section.name](policy, section, seed=seed, hardware=hardware)


def _check_kind(section: AlgorithmSection, known: Mapping[str, object], what: str) -> None:
    if section.name not in known:
        _refuse(
            f"algorithm.name={section.name!r}: does not learn what this workload does, which {what}",
            f"use {' or '.join(sorted(known))}",
        )


def check_hardware(settings: Settings, ranks: int) -> None:
    """Raises ConfigurationError, by the setting to change, for what so many ranks or such networks do not learn."""
    if ranks > 1:
        _check_ranks(settings, ranks)
    compiled = settings.learner.compile
    if compiled or settings.learner.precision != "float32":
        _check_networks(settings, compiled=compiled)


def _check_networks(settings: Settings, *, compiled: bool) -> None:
    asked_for = "learner.compile=true" if compiled else f"learner.precision={settings.learner.precision!r}"
    name = settings.algorithm.name
    if name not in ON_HARDWARE and (compiled or name not in OF_TOKENS):
        _refuse(
            f"{asked_for}: algorithm.name={name!r} has none of it",
            f"leave it at its default, or use {_known()}",
        )
    if settings.policy.recurrent != "none":
        _refuse(
            f"{asked_for}: not for the recurrent core of policy.recurrent={settings.policy.recurrent!r}",
            "leave it at its default, or policy.recurrent='none'",
        )
    if compiled and settings.policy.dropout:
        _refuse(
            f"learner.compile=true: the compiler cannot draw what policy.dropout={settings.policy.dropout} drops",
            "leave it at false, or policy.dropout=0",
        )


def _check_ranks(settings: Settings, size: int) -> None:
    policy, learner = settings.policy, settings.learner
    if settings.algorithm.name not in ON_HARDWARE:
        _refuse(
            f"algorithm.name={settings.algorithm.name!r}: runs on one rank only, and there are {size}",
            f"use {_known()}, or learner.ranks=1",
        )
    alone = {
        f"policy.recurrent={policy.recurrent!r}: sequences are not divided among {size} ranks": (
            policy.recurrent != "none",
            "policy.recurrent='none' (policy.frame_stack remembers too)",
        ),
        f"policy.dropout={policy.dropout}: {size} ranks would drop the same features": (
            policy.dropout > 0,
            "policy.dropout=0",
        ),
        f"learner.record={str(learner.record)!r}: rank 0 of {size} sees a part of the experience": (
            learner.record is not None,
            "no recording",
        ),
        f"learner.feed_from={str(learner.feed_from)!r}: a recording is read by one rank, and there are {size}": (
            learner.feed_from is not None,
            "experience of actors",
        ),
    }
    for cause, (is_asked_for, remedy) in alone.items():
        if is_asked_for:
            _refuse(cause, f"use {remedy}, or learner.ranks=1")


def _known() -> str:
    return " or ".join(sorted(ON_HARDWARE))


def _refuse(cause: str, remedy: str) -> None:
    raise ConfigurationError(f"{cause}; {remedy}")
