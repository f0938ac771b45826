"""The model of a run that acts step by step.

Its observations and actions have a fixed size; each step takes one forward pass.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import torch

from penstock.config.settings import ConfigurationError, Settings
from penstock.config.workload import Workload, load
from penstock.learner.algorithms.registry import HardwareMaker, make
from penstock.learner.algorithms.shared.rank_group import RankGroup
from penstock.learner.algorithms.shared.schedule import hardware_of
from penstock.learner.model.model import Model, model_of, target_of
from penstock.learner.probe import make_probe
from penstock.policy.policy import Policy
from penstock.protocol.schema import TensorRule, mask_rules, state_rules
from penstock.protocol.spaces import Space

_NONE: Final[Mapping[str, HardwareMaker]] = MappingProxyType({})


def make_model(
    settings: Settings,
    workload: Workload,
    group: RankGroup,
    device: torch.device,
    own: Mapping[str, HardwareMaker] = _NONE,
) -> Model:
    """Return the model of a run; raises ConfigurationError for settings that do not fit together.

    group: the ranks that learn it together. own: algorithms of the workload, by `algorithm.name`.
    """
    observation, action = load(workload.spaces)(settings.environment)
    settings = settings.model_copy(update={"policy": settings.algorithm.policy_section(settings.policy)})
    policies = [_build(workload, settings, observation, action) for _ in range(2)]
    algorithm = make(
        policies[0].to(device),
        settings.algorithm,
        seed=settings.seed,
        hardware=hardware_of(settings.learner, group),
        own=own,
    )
    probe = make_probe(observation, policies[1], settings.seed)
    target = target_of(settings, workload)
    extra = (*_mask_rules(settings, action), *state_rules(policies[1].state_space))
    spaces, state = (observation, action), policies[1].state_space
    return model_of(settings, algorithm, policies[1], spaces, probe, device, target, extra, state)


def _mask_rules(settings: Settings, action: Space) -> tuple[TensorRule, ...]:
    key = settings.environment.mask_key
    rules = mask_rules(action) if key else ()
    if key and not rules:
        raise ConfigurationError(
            f"environment.mask_key={key!r}: the actions {action} are no choices of one of n, which alone "
            "take a mask; leave it empty"
        )
    return rules


def _build(workload: Workload, settings: Settings, observation: Space, action: Space) -> Policy:
    _check_state(settings)
    try:
        policy: Policy = load(workload.policy)(observation, action, settings.policy, settings.seed)
    except ConfigurationError:
        raise
    except ValueError as error:
        raise ConfigurationError(f"environment.id={settings.environment.id!r}: {error}") from error
    policy.seed_actions(settings.seed)
    return policy


def _check_state(settings: Settings) -> None:
    policy, length = settings.policy, settings.actor.unroll_length
    if policy.burn_in and policy.recurrent == "none":
        raise ConfigurationError(
            f"policy.burn_in={policy.burn_in}: policy.recurrent='none' has no state to refresh; set it to 0"
        )
    if policy.burn_in >= length:
        raise ConfigurationError(
            f"policy.burn_in={policy.burn_in}: nothing is left to learn from of actor.unroll_length={length} "
            "steps; lower the one or raise the other"
        )
