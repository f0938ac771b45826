"""Sections of the algorithms: their settings, bounds and defaults."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import (
    Field,
    SerializeAsAny,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
)
from pydantic_core import PydanticCustomError

from penstock.config.configuration_error import ConfigurationError
from penstock.config.sections import (
    ADVANCED,
    Count,
    Fraction,
    NonNegative,
    PolicySection,
    Positive,
    PositiveReal,
    Section,
    Width,
)
from penstock.config.workload import entries, load


class AlgorithmSection(Section):
    """Settings and properties of every algorithm."""

    can_share: ClassVar[bool] = False
    """Whether several ranks can share its updates (`learner.ranks`)."""
    can_compile: ClassVar[bool] = False
    """Whether its networks can be compiled (`learner.compile`)."""
    can_round: ClassVar[bool] = False
    """Whether its networks can run in bfloat16 (`learner.precision`)."""

    name: str
    """Which algorithm, a choice."""
    discount: Fraction = 0.99
    """γ, per step."""

    @property
    def lock_step(self) -> bool:
        """Rounds replace the budget."""
        return False

    @property
    def update_steps(self) -> int:
        """Steps that an update takes from the log; 0 where it samples from memory."""
        return 0

    def policy_section(self, section: PolicySection) -> PolicySection:
        """Return the section of the policy that the algorithm needs."""
        return section


class BatchSection(AlgorithmSection):
    """Settings of algorithms that take a batch of steps for each update."""

    batch_steps: Positive = 2048
    """Environment steps of one update."""

    @property
    def update_steps(self) -> int:
        return self.batch_steps


class OnPolicySection(BatchSection):
    """Settings of algorithms that learn from each batch once."""

    can_share: ClassVar[bool] = True
    can_compile: ClassVar[bool] = True
    can_round: ClassVar[bool] = True

    staleness: Count = 1
    """Updates that experience may lag behind when it is begun (S); 0: lock-step."""
    stale_after: Annotated[Positive | None, ADVANCED] = None
    """Fragments older than this many updates at their turn are dropped as stale (H); default 4(S+1)."""
    gae_lambda: Fraction = 0.95
    """λ of GAE and V-trace, per step."""
    value_coefficient: NonNegative = 0.5
    """Weight of the value loss, a ratio."""
    entropy_coefficient: Annotated[float, Field(ge=-1e6, le=1e6)] = 0.0
    """Weight of the entropy bonus, per nat."""
    entropy_decay: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """The weight of the entropy bonus is multiplied by this after every update, a ratio; 1: constant."""
    entropy_floor: Annotated[NonNegative, ADVANCED] = 0.0
    """The decaying weight of the entropy bonus stays at or above this, per nat."""
    normalise_advantages: bool = True
    """Standardise the advantages of each batch over its valid steps; yes or no."""
    scale_rewards: bool = False
    """Divide rewards by the running standard deviation of the discounted return; yes or no."""
    learning_rate: NonNegative = 3e-4
    """Step size of Adam, per gradient step."""
    learning_rate_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule of the learning rate over `learner.total_steps`, a choice; linear and cosine end at 0."""
    warmup_updates: Count = 0
    """Updates over which the learning rate rises from 0, whatever its schedule."""
    adam_epsilon: Annotated[NonNegative, ADVANCED] = 1e-5
    """ε of Adam, in the unit of a gradient."""
    max_gradient_norm: NonNegative = 0.5
    """Gradients are scaled down to this norm, in the unit of a gradient; 0: off."""
    max_log_ratio: Annotated[PositiveReal, ADVANCED] = 50.0
    """A fragment with a step whose |log π/μ| lies above this is booked invalid, in nats."""

    @field_validator("entropy_floor")
    @classmethod
    def _floor_lies_below(cls, floor: float, info: ValidationInfo) -> float:
        start = info.data.get("entropy_coefficient", floor)
        if info.data.get("entropy_decay", 1.0) < 1.0 and floor > start:
            raise ValueError(
                f"lies above entropy_coefficient={start:g}; a weight that decays begins above its floor"
            )
        return floor

    @property
    def lock_step(self) -> bool:
        return self.staleness == 0


class ReplaySection(AlgorithmSection):
    """Settings of algorithms that learn from a replay memory."""

    capacity: Positive = 100_000
    """Transitions in replay; the log keeps their fragments, see `broker.max_log_entries`."""
    capacity_bytes: Positive = 128 * 1024 * 1024
    """Payload bytes of the log that replay holds on to; its memory in the learner is about twice that."""
    learning_starts: Positive = 1000
    """Transitions in replay before the first gradient step."""
    batch_size: Positive = 128
    """Transitions of a gradient step."""
    replay_ratio: PositiveReal = 1.0
    """Gradient steps for every environment step that enters replay."""
    error_steps: Positive = 1024
    """How far inserted and gradient steps may be from the replay ratio, in environment steps."""
    n_step: Positive = 1
    """Steps that a target looks ahead within a fragment."""
    prioritised: bool = False
    """Sample in proportion to the last temporal-difference error (Schaul et al. 2016); false: uniformly."""
    priority_exponent: Fraction = 0.6
    """α of the priorities."""
    importance_exponent: Fraction = 0.4
    """β of the importance weights at the start; rises to 1 over `learner.total_steps`."""
    learning_rate: NonNegative = 3e-4
    """Step size of Adam."""
    learning_rate_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule of the learning rate over `learner.total_steps`."""
    adam_epsilon: Annotated[NonNegative, ADVANCED] = 1e-8
    """ε of Adam."""
    max_gradient_norm: NonNegative = 0.0
    """Gradients are scaled down to this norm; 0: off."""
    target_period: Positive = 1
    """Gradient steps between two moves of the target network."""
    target_rate: Fraction = 0.005
    """Share of the way to the learned network that the target network moves (τ); 1: it becomes a copy."""
    publish_period: Positive = 32
    """Gradient steps between two publications, at least."""


class DQNSection(ReplaySection):
    """Deep Q-network: value-based, for one choice of n."""

    name: Literal["dqn"] = "dqn"
    """Which algorithm, a choice."""
    double: bool = True
    """The learned network chooses the next action, the target network values it (van Hasselt et al. 2016)."""
    max_gradient_norm: NonNegative = 10.0
    """Gradients are scaled down to this norm; 0: off."""
    target_period: Positive = 500
    """Gradient steps between two moves of the target network."""
    target_rate: Fraction = 1.0
    """Share of the way to the learned network that the target network moves (τ); 1: it becomes a copy."""
    epsilon_initial: Fraction = 1.0
    """ε at the start: the share of actions that are drawn uniformly."""
    epsilon_final: Fraction = 0.05
    """ε from the end of its descent on."""
    epsilon_fraction: Fraction = 0.1
    """Share of `learner.total_steps` over which ε falls linearly; 0: it is `epsilon_final` from the start."""
    epsilon_spread: NonNegative = 0.0
    """α of Ape-X: environment i of N acts with ε^(1 + α·i/(N−1)) (Horgan et al. 2018: 7); 0: all alike."""

    def policy_section(self, section: PolicySection) -> PolicySection:
        """Action values in place of logits; a second network only where there are two streams."""
        trunk = section.shared_trunk if section.dueling else True
        return section.model_copy(update={"discrete": "epsilon_greedy", "shared_trunk": trunk})


class SACSection(ReplaySection):
    """Soft actor-critic: for continuous actions between bounds."""

    name: Literal["sac"] = "sac"
    """Which algorithm, a choice."""
    batch_size: Positive = 256
    """Transitions of a gradient step."""
    critic_hidden_sizes: tuple[Width, ...] = (256, 256)
    """Widths of the hidden layers of each of the two critics."""
    critic_activation: Literal["tanh", "relu", "elu", "silu"] = "relu"
    """Their non-linearity."""
    temperature: PositiveReal = 1.0
    """Weight of the entropy (α); where it is tuned, the first."""
    tune_temperature: bool = True
    """Adjust the temperature so that the entropy comes to `target_entropy`."""
    target_entropy: float | None = None
    """Entropy of the actions, squashed to (−1, 1), in nats; none: minus the number of action elements."""

    def policy_section(self, section: PolicySection) -> PolicySection:
        """A squashed Gaussian whose width depends on the observation; the critics are the learner's own."""
        return section.model_copy(
            update={"continuous": "squashed", "state_dependent_std": True, "shared_trunk": True}
        )


class TokenPPOSection(OnPolicySection):
    """Proximal policy optimisation of a language model by token, held near the policy it began with."""

    can_share: ClassVar[bool] = False
    can_compile: ClassVar[bool] = False

    name: Literal["token_ppo"] = "token_ppo"
    """Which algorithm, a choice."""
    discount: Fraction = 1.0
    """γ, per token."""
    turn_discount: Fraction = 1.0
    """γ_turn, per turn: what a later turn of a conversation earns counts so much less in the one before."""
    bootstrap_truncated: bool = False
    """Whether the critic values the continuation of a truncated column; false: its length ended it."""
    advantage: Literal["gae", "group", "reinforce"] = "gae"
    """A choice. gae: with the critic; group: less the mean of its prompt; reinforce: less the batch's."""
    epochs: Positive = 2
    """Passes over each batch, which is trained once: the most uses of a token."""
    minibatches: Positive = 4
    """Gradient steps per epoch, each on whole responses."""
    micro_batch_tokens: Positive = 16_384
    """Most token places, with padding, in memory at once; a longer response is processed alone."""
    behaviour_weight_cap: Annotated[NonNegative, ADVANCED] = 2.0
    """Largest π_prox/μ of a token, a ratio of probabilities."""
    clip_range: NonNegative = 0.2
    """ε of the surrogate, a ratio of probabilities."""
    dual_clip: Annotated[Annotated[float, Field(gt=1.0)] | None, ADVANCED] = None
    """A ratio: the surrogate of a negative advantage stays above this multiple of it; none: off."""
    target_kl: NonNegative | None = None
    """Stop the epochs of an update when KL(π_prox‖π_θ) exceeds 1.5 times this, nats per token; none: off."""
    kl_coefficient: NonNegative = 0.05
    """β, per nat: weight of KL(π‖reference) in rewards, at first with a `kl_target`; 0: no reference."""
    kl_target: PositiveReal | None = None
    """KL(π‖reference) that β is adapted to (Ziegler et al. 2019), in nats per response; none: β is fixed."""
    kl_horizon: PositiveReal = 10_000.0
    """Responses over which β follows: a batch of n changes it by at most 20 % · n / horizon."""
    log_ratio_bound: PositiveReal = 10.0
    """The log-ratio to the reference enters the reward within ± this many nats."""
    eos_penalty: NonNegative = 0.0
    """Taken from the score of a response that its length ended; 0: the score rates the text as it is."""
    normalise_advantages: bool = True
    """Advantages get mean 0 and deviation 1 in a batch; `group`: scores are divided by that of theirs."""
    scale_rewards: Literal[False] = False
    """Always false: `kl_coefficient` is chosen for the scale of the scores."""
    learning_rate: NonNegative = 1e-5
    """Step size of Adam for the policy, per gradient step; LoRA needs ten times that of full fine-tuning."""
    max_gradient_norm: NonNegative = 1.0
    """Gradients of policy and of critic are scaled down to this norm, each by itself; 0: off."""
    critic_learning_rate: NonNegative = 1e-4
    """Step size of Adam for the value head, per gradient step."""
    critic_warmup_updates: Count = 0
    """First updates in which only the value head learns."""
    value_lambda: Fraction = 1.0
    """λ of the value targets, per token; 1: returns, without bias (Yuan et al. 2025)."""
    value_coefficient: NonNegative = 0.1
    """Weight of the value loss where it reaches the policy's own weights, a ratio."""
    value_clip: Annotated[NonNegative | None, ADVANCED] = 0.2
    """Largest change of a value in one update, in the unit of the score; none: off."""

    @field_validator("kl_target")
    @classmethod
    def _can_adapt(cls, target: float | None, info: ValidationInfo) -> float | None:
        if target is not None and info.data.get("kl_coefficient") == 0.0:
            raise ValueError("kl_coefficient=0 is multiplied and stays 0; begin with another, such as 0.05")
        return target

    @field_validator("advantage")
    @classmethod
    def _turns_need_a_critic(cls, advantage: str, info: ValidationInfo) -> str:
        for name, usual in (("turn_discount", 1.0), ("bootstrap_truncated", False)):
            if advantage != "gae" and info.data.get(name, usual) != usual:
                raise ValueError(f"{advantage} has no critic, by which {name} values turns; use gae")
        return advantage

    @field_validator("eos_penalty")
    @classmethod
    def _an_end_is_penalised(cls, penalty: float, info: ValidationInfo) -> float:
        if penalty and info.data.get("bootstrap_truncated"):
            raise ValueError("is taken where a length ends a response; with bootstrap_truncated it goes on")
        return penalty


def algorithm_sections() -> dict[str, type[AlgorithmSection]]:
    sections: dict[str, type[AlgorithmSection]] = {}
    for workload, name, path in entries("algorithms"):
        section = load(path)
        if not (isinstance(section, type) and issubclass(section, AlgorithmSection)):
            raise ConfigurationError(f"workload={workload!r}: {path!r} is no AlgorithmSection")
        if sections.setdefault(name, section) is not section:
            raise ConfigurationError(
                f"workload={workload!r}: its section for algorithm.name={name!r} differs from that of "
                "another workload"
            )
    return sections


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


class CloneSection(BatchSection):
    """How a policy is cloned from a recording (`penstock train --from`)."""

    name: Literal["clone"] = "clone"
    """Which algorithm, a choice."""
    batch_steps: Positive = 1024
    """Environment steps of one update."""
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


class RandomSection(BatchSection):
    """Random actions, from which nothing is learned: the baseline of a task."""

    name: Literal["random"] = "random"
    """Which algorithm, a choice."""
    batch_steps: Positive = 2048
    """Environment steps that are counted at once."""


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
    """Return the section of an algorithm of the core or an installed workload; None: unknown."""
    if name in SECTIONS:
        return SECTIONS[name]
    return algorithm_sections().get(name)


def algorithm_name(value: Any) -> str:
    """Return the name of the algorithm of a section, given as a table or an object."""
    name = value.get("name") if isinstance(value, Mapping) else getattr(value, "name", None)
    return DEFAULT_ALGORITHM if name is None else str(name)


def _read(value: Any, handler: ValidatorFunctionWrapHandler) -> AlgorithmSection:
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
"""Type of the error for an unknown algorithm."""
AnyAlgorithm = Annotated[
    SerializeAsAny[AlgorithmSection],
    WrapValidator(_read),
    Field(description="How the learner learns; `algorithm.name` chooses the section."),
]
"""The section of any known algorithm; the default is PPO's."""
