"""Settings of algorithms that learn from each batch once and forget it."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from penstock.config.sections.algorithm_section import AlgorithmSection
from penstock.config.sections.section import ADVANCED, Count, Fraction, NonNegative, Positive, PositiveReal


class OnPolicySection(AlgorithmSection):
    """Settings of algorithms that learn from each batch once and forget it."""

    can_share: ClassVar[bool] = True
    can_compile: ClassVar[bool] = True
    can_round: ClassVar[bool] = True

    batch_steps: Positive = 2048
    """Environment steps of one update."""
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
        """True where actors and learner take turns: staleness is 0."""
        return self.staleness == 0

    @property
    def update_steps(self) -> int:
        """Return the charged steps of an update."""
        return self.batch_steps
