"""How the learner learns where actions are the tokens of a text and an episode is one response."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from penstock.config.sections.on_policy import OnPolicySection
from penstock.config.sections.section import ADVANCED, Count, Fraction, NonNegative, Positive, PositiveReal


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
    """A column that was cut short goes on: what follows is valued; false: its length ended it; yes or no."""
    advantage: Literal["gae", "group", "reinforce"] = "gae"
    """A choice. gae: with the critic; group: less the mean of its prompt; reinforce: less the batch's."""
    epochs: Positive = 2
    """Passes over each batch, which is trained once: the most uses of a token."""
    minibatches: Positive = 4
    """Gradient steps per epoch, each on whole responses."""
    micro_batch_tokens: Positive = 16_384
    """Most token places, padding too, in memory at once; a longer response is a part of its own."""
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
    """Never: scores have a scale of their own, to which `kl_coefficient` is chosen."""
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
