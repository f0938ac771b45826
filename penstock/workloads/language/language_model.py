"""The learner's side of a language model: policy, algorithm of tokens, probe."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
import torch

from penstock.config.algorithm_sections import TokenPPOSection
from penstock.config.settings import ConfigurationError, Settings
from penstock.config.workload import Workload, load
from penstock.protocol.specification import Probe
from penstock.workloads.language.policy import LanguagePolicy, build
from penstock.workloads.plugin.learning import (
    AlgorithmMaker,
    Model,
    RankGroup,
    TokenPPO,
    choose,
    hardware_of,
    model_of,
    target_of,
)

ALGORITHMS: Final[Mapping[str, AlgorithmMaker]] = {"token_ppo": TokenPPO}
PROBE_ROWS: Final = 4
PROBE_TOKENS: Final = 8


def make_model(settings: Settings, workload: Workload, group: RankGroup, device: torch.device) -> Model:
    observation, action = load(workload.spaces)(settings.environment)
    held = isinstance(settings.algorithm, TokenPPOSection) and settings.algorithm.kl_coefficient > 0.0
    policy = build(observation, action, settings.policy, settings.seed, has_reference=held, learns=True)
    _check(settings, policy)
    _begin(policy)
    algorithm = choose(
        ALGORITHMS,
        policy.to(device),
        settings.algorithm,
        seed=settings.seed,
        hardware=hardware_of(settings.learner, group),
        learns="writes tokens",
    )
    replica = build(observation, action, settings.policy, settings.seed)
    probe = make_probe(policy.vocabulary, settings.seed)
    target = target_of(settings, workload)
    return model_of(settings, algorithm, replica, (observation, action), probe, device, target)


def make_probe(vocabulary: int, seed: int) -> Probe:
    """Return a probe: a few short rows of random tokens, whose answers are joint log-probabilities."""
    rows = np.random.default_rng(seed).integers(vocabulary, size=(PROBE_ROWS, PROBE_TOKENS + 1))
    return Probe(observation={"observation": rows[:, :-1].copy()}, action={"action": rows[:, 1:].copy()})


def _begin(policy: LanguagePolicy) -> None:
    place = policy.section.begin_with
    if not place:
        return
    try:
        policy.load(Path(place).read_bytes())
    except OSError as error:
        raise ConfigurationError(
            f"policy.kwargs.begin_with={place!r}: {error.strerror}; name a file of weights, or leave it out"
        ) from error
    except ValueError as error:
        raise ConfigurationError(
            f"policy.kwargs.begin_with={place!r}: holds no weights of this network ({error}); name those of "
            "a run with the same policy section"
        ) from error


def _check(settings: Settings, policy: LanguagePolicy) -> None:
    ppo = settings.algorithm if isinstance(settings.algorithm, TokenPPOSection) else None
    if ppo is not None and policy.section.critic == "adapter" and ppo.advantage != "gae":
        raise ConfigurationError(
            f"policy.kwargs.critic='adapter': algorithm.advantage={ppo.advantage!r} does without a "
            "critic; leave critic out, or say advantage='gae'"
        )
    # What follows a row is valued behind its last token.
    length = settings.actor.unroll_length + (ppo is not None and ppo.bootstrap_truncated)
    most = policy.positions
    if most is not None and length > most:
        raise ConfigurationError(
            f"actor.unroll_length={length}: the model of policy.kwargs.model={policy.section.model!r} reads "
            f"{most} tokens; use at most that for prompt and response"
        )
