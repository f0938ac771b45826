"""What the actors step."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from penstock.config.sections.section import Fraction, Positive, Section
from penstock.wire.limits import MAX_SLOTS


class RewardWrapper(Section):
    """One change to the rewards that the learner is given: `clip`, `scale` or `shape`, one of them."""

    clip: tuple[float, float] | None = None
    """Lowest and highest reward of a step."""
    scale: float | None = None
    """Factor of every reward."""
    shape: str | None = None
    """`module:function`, a potential Φ of observations: γΦ(s') − Φ(s) is added (Ng et al. 1999)."""
    discount: Fraction | None = None
    """γ of `shape`; none: `algorithm.discount`, with which shaping changes no optimal policy."""

    @model_validator(mode="after")
    def _is_one_change(self) -> Self:
        if sum(value is not None for value in (self.clip, self.scale, self.shape)) != 1:
            raise ValueError("give one of clip = [LOW, HIGH], scale = FACTOR, shape = 'module:function'")
        if self.clip is not None and not self.clip[0] < self.clip[1]:
            raise ValueError("clip: the first number must be below the second")
        if self.shape is not None and not all(self.shape.partition(":")):
            raise ValueError("shape: write module:function")
        if self.discount is not None and self.shape is None:
            raise ValueError("discount: only shape has one")
        return self


class EnvironmentSection(Section):
    """Describes the environments that actors step."""

    id: str = "CartPole-v1"
    """Any Gymnasium id; `module:Id` imports the module first."""
    kwargs: dict[str, Any] = {}
    """Arguments of the environment's constructor."""
    count: Annotated[int, Field(gt=0, le=MAX_SLOTS)] = 8
    """Environments per actor (N)."""
    vectorise: Literal["auto", "sync", "vector", "async"] = "auto"
    """sync: one loop; vector: the environment's vector entry; async: processes; auto: vector, else sync."""
    max_episode_steps: Positive | None = None
    """Overrides the time limit of the registered environment, in steps."""
    reward: tuple[RewardWrapper, ...] = ()
    """Changes to the learner's rewards, first to last, such as `[{clip = [-1, 1]}, {scale = 0.1}]`."""
    mask_key: str = ""
    """Key of the Dict observation, or else of `info`, that holds the allowed actions; empty: all are."""
