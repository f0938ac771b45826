"""How the learner learns: a section for each algorithm, chosen by `algorithm.name`.

The core reads an `AlgorithmSection`; all else is between a section and its algorithm. A new algorithm of the
core adds its section to `SECTIONS` and its class to `penstock.learner.algorithms`; one of a workload is named
by the workload's record (`Workload.algorithms`). Sections of algorithms that learn from replay are in
`penstock.config.sections.replay`, those of token sequences in `penstock.config.sections.token`.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import (
    Field,
    SerializeAsAny,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
)
from pydantic_core import PydanticCustomError

from penstock.config.plugin_sections import algorithm_sections
from penstock.config.sections.algorithm_section import AlgorithmSection
from penstock.config.sections.on_policy import OnPolicySection
from penstock.config.sections.replay import DQNSection, SACSection
from penstock.config.sections.section import ADVANCED, Fraction, NonNegative, Positive, PositiveReal

DEFAULT_ALGORITHM: Final = "ppo"


class PPOSection(OnPolicySection):
    """Proximal policy optimisation."""

    name: Literal["ppo"] = "ppo"
    """Which algorithm, a choice."""
    epochs: Positive = 4
    """Passes over each batch, which is trained once: the most uses of a step."""
    lagging_epochs: Annotated[Positive | None, ADVANCED] = None
    """Passes over those of its steps that lag: are more than `staleness` updates old; none: as many."""
    mask_after: Annotated[Positive | None, ADVANCED] = None
    """The losses leave out steps older than this many updates; fragments count as trained; none: off."""
    minibatches: Positive = 4
    """Gradient steps per epoch."""
    advantage: Literal["gae", "vtrace"] = "gae"
    """How advantages and value targets are estimated, once per batch with the current critic; a choice."""
    objective: Literal["decoupled", "coupled"] = "decoupled"
    """A choice. decoupled: clip around the policy at batch start; coupled: around the behaviour policy."""
    rho_clip: Annotated[NonNegative, ADVANCED] = 1.0
    """ρ̄ of V-trace, a ratio of probabilities."""
    c_clip: Annotated[NonNegative, ADVANCED] = 1.0
    """c̄ of V-trace, a ratio of probabilities."""
    behaviour_weight_cap: Annotated[NonNegative, ADVANCED] = 5.0
    """Largest π_prox/μ of the decoupled objective, a ratio of probabilities."""
    clip_range: NonNegative = 0.2
    """ε of the surrogate, a ratio of probabilities."""
    clip_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule of the clip range over `learner.total_steps`, a choice; linear and cosine end at 0."""
    dual_clip: Annotated[Annotated[float, Field(gt=1.0)] | None, ADVANCED] = None
    """A ratio: the surrogate of a negative advantage stays above this multiple of it; none: off."""
    value_clip: Annotated[NonNegative | None, ADVANCED] = None
    """Largest change of a value in one update, in the unit of the scaled return; none: off."""
    target_kl: NonNegative | None = None
    """Stop the epochs of an update when KL(π_prox‖π_θ) exceeds 1.5 times this, in nats; none: off."""
    adaptive_kl: Annotated[PositiveReal | None, ADVANCED] = None
    """Adapt the learning rate after each update to keep KL(π_prox‖π_θ) near this, in nats; none: off."""
    learning_rate_range: Annotated[tuple[PositiveReal, PositiveReal], ADVANCED] = (1e-6, 1e-2)
    """Lowest and highest learning rate that `adaptive_kl` may choose, per gradient step."""

    @field_validator("adaptive_kl")
    @classmethod
    def _has_one_schedule(cls, target: float | None, info: ValidationInfo) -> float | None:
        schedule = info.data.get("learning_rate_schedule", "constant")
        if target is not None and schedule != "constant":
            raise ValueError(
                f"learning_rate_schedule={schedule} sets the rate, too; say constant or leave one out"
            )
        return target

    @field_validator("learning_rate_range")
    @classmethod
    def _is_a_range(cls, bounds: tuple[float, float]) -> tuple[float, float]:
        if bounds[0] > bounds[1]:
            raise ValueError("the lowest comes first")
        return bounds


class ImpalaSection(OnPolicySection):
    """Importance-weighted actor-learner: V-trace actor-critic, one gradient step per batch."""

    name: Literal["impala"] = "impala"
    """Which algorithm, a choice."""
    gae_lambda: Fraction = 1.0
    """λ of V-trace, per step; 1 as published."""
    rho_clip: NonNegative = 1.0
    """ρ̄ of V-trace, a ratio of probabilities; for value targets and policy gradient."""
    c_clip: NonNegative = 1.0
    """c̄ of V-trace, a ratio of probabilities."""
    normalise_advantages: bool = False
    """Standardise the advantages of each batch over its valid steps; yes or no."""


class ReinforceSection(OnPolicySection):
    """REINFORCE with a learned baseline, one gradient step per batch."""

    name: Literal["reinforce"] = "reinforce"
    """Which algorithm, a choice."""
    advantage: Literal["monte-carlo", "gae"] = "monte-carlo"
    """A choice. monte-carlo: returns less the baseline, bootstrapped at the cut; gae: λ-returns."""


class CloneSection(AlgorithmSection):
    """How a policy is cloned from a recording (`penstock train --from`).

    The actions in it are made likely.
    """

    name: Literal["clone"] = "clone"
    """Which algorithm, a choice."""
    batch_steps: Positive = 1024
    """Steps of one update."""
    passes: Positive = 20
    """Passes over the recording, each in another order."""
    minibatches: Positive = 4
    """Gradient steps of an update."""
    validation: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1
    """Share of the recording's fragments that is never trained on, and measured after every update."""
    learning_rate: NonNegative = 1e-3
    """Step size of Adam."""
    adam_epsilon: Annotated[NonNegative, ADVANCED] = 1e-8
    """ε of Adam."""
    max_gradient_norm: NonNegative = 0.0
    """Gradients are scaled down to this norm; 0: off."""
    value_coefficient: NonNegative = 0.0
    """Weight of fitting the critic to the returns; 0: it is left as it is."""

    @property
    def update_steps(self) -> int:
        """Return the charged steps of an update."""
        return self.batch_steps


class RandomSection(AlgorithmSection):
    """Random actions, from which nothing is learned: the baseline of a task."""

    name: Literal["random"] = "random"
    """Which algorithm, a choice."""
    batch_steps: Positive = 2048
    """Steps that are counted at once."""

    @property
    def update_steps(self) -> int:
        """Return the charged steps of an update."""
        return self.batch_steps


SECTIONS: Final[Mapping[str, type[AlgorithmSection]]] = {
    "ppo": PPOSection,
    "impala": ImpalaSection,
    "reinforce": ReinforceSection,
    "clone": CloneSection,
    "random": RandomSection,
    "dqn": DQNSection,
    "sac": SACSection,
}
"""The sections of the core's algorithms, by `algorithm.name`."""


def section_of(name: str) -> type[AlgorithmSection] | None:
    """Return the section of an algorithm of the core or of an installed workload, None where there is none.

    Raises ConfigurationError for a section of a workload that cannot be imported.
    """
    if name in SECTIONS:
        return SECTIONS[name]
    return algorithm_sections().get(name)


def algorithm_name(value: Any) -> str:
    """Return the algorithm that a section is for, written or made; the default's where it does not say."""
    name = value.get("name") if isinstance(value, Mapping) else getattr(value, "name", None)
    return DEFAULT_ALGORITHM if name is None else str(name)


def _read(value: Any, handler: ValidatorFunctionWrapHandler) -> AlgorithmSection:
    """The section that a value is, or describes by its name and its keys."""
    if not isinstance(value, Mapping):
        section: AlgorithmSection = handler(value)
        return section
    name = algorithm_name(value)
    kind = section_of(name)
    if kind is None:
        known = ", ".join(map(repr, [*SECTIONS, *algorithm_sections()]))
        raise PydanticCustomError(UNKNOWN, "not known; use {known}", {"name": name, "known": known})
    return kind.model_validate(dict(value))


UNKNOWN: Final = "algorithm_unknown"
"""Type of the error for an algorithm that neither the core nor a workload has."""
AnyAlgorithm = Annotated[
    SerializeAsAny[AlgorithmSection],
    WrapValidator(_read),
    Field(description="How the learner learns; `algorithm.name` says which of the sections it is."),
]
"""The section of any algorithm that there is; the default is PPO's."""
