"""What a run of thoughts learns with: policy, algorithm, probe."""

import logging
from collections.abc import Mapping
from typing import Any, Final

import torch

from penstock.config.settings import ConfigurationError, Settings
from penstock.config.workload import Workload
from penstock.workloads.language.language_model import make_probe
from penstock.workloads.plugin.learning import (
    Algorithm,
    AlgorithmMaker,
    Hardware,
    Model,
    RankGroup,
    choose,
    hardware_of,
    model_of,
    target_of,
)
from penstock.workloads.thoughts.algorithm.reinforce import ThoughtReinforce
from penstock.workloads.thoughts.environment import spaces, task_of, thoughts_section
from penstock.workloads.thoughts.model import build
from penstock.workloads.thoughts.settings import ThoughtReinforceSection
from penstock.workloads.thoughts.start.thoughts_start import check_lengths

_LEARNS: Final = "thinks before it answers"

log = logging.getLogger(__name__)


def make_thought_model(
    settings: Settings, workload: Workload, group: RankGroup, device: torch.device
) -> Model:
    if device.type != "cpu":
        raise ConfigurationError(f"learner.device={str(device)!r}: thoughts are learned on the CPU; say cpu")
    check_lengths(settings)
    observation, action = spaces(settings.environment)
    held = isinstance(settings.algorithm, ThoughtReinforceSection) and settings.algorithm.kl_coefficient > 0.0
    policy = build(observation, action, settings.policy, settings.seed, has_reference=held)
    algorithm = choose(
        _algorithms(settings),
        policy,
        settings.algorithm,
        seed=settings.seed,
        hardware=hardware_of(settings.learner, group),
        learns=_LEARNS,
    )
    replica = build(observation, action, settings.policy, settings.seed)
    probe = make_probe(policy.vocabulary, settings.seed)
    target = target_of(settings, workload)
    return model_of(settings, algorithm, replica, (observation, action), probe, device, target)


def _algorithms(settings: Settings) -> Mapping[str, AlgorithmMaker]:
    task, layout = task_of(settings.environment)

    def make(policy: Any, section: Any, *, seed: int, hardware: Hardware) -> Algorithm:
        del hardware  # the section's class says that it can use none
        log.info("thoughts are learned", extra=_what_is_on(settings, section))
        return ThoughtReinforce(
            policy,
            section,
            task=task,
            layout=layout,
            thought_tokens=thoughts_section(settings.environment).thought_tokens,
            total_updates=settings.learner.total_updates,
            seed=seed,
        )

    return {"thought_reinforce": make}


def _what_is_on(settings: Settings, section: ThoughtReinforceSection) -> dict[str, str]:
    """Return what a run learns with, by what it is for, in words."""
    learned = section.baseline in ("learned", "both")
    layers = f", {section.baseline_layers} layers of {section.baseline_hidden}, {section.baseline_reads}"
    entropy = section.entropy_coefficient
    evaluation, validate_every = settings.evaluation, section.validate_every
    return {
        "baseline": section.baseline + (layers if learned else ""),
        "advantage": f"gae, λ {section.gae_lambda}" if section.advantage == "gae" else section.advantage,
        "schedule": f"{section.learning_rate_schedule}, {section.learning_rate} to a share of "
        f"{section.learning_rate_floor}, {section.warmup_updates} updates of warm-up",
        "entropy": f"{entropy} × {section.entropy_decay} an update, at least {section.entropy_floor}"
        if entropy
        else "off",
        "kl": f"{section.kl_coefficient} to the start" if section.kl_coefficient else "off",
        "answer_without_thought": f"λ₀ {section.direct_coefficient}" if section.direct_coefficient else "off",
        "patience": "off"
        if evaluation.patience is None
        else f"{evaluation.patience} evaluations, by {evaluation.min_improvement}",
        "validation": f"every {validate_every} updates on {section.validation_questions} questions, theatre "
        + (f"ends it after {section.theatre_grace}" if section.ends_theatre else "is only told")
        if validate_every
        else "off",
    }
