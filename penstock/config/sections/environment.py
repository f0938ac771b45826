"""What the actors step."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from penstock.config.sections.section import Finite, Fraction, Positive, Section
from penstock.wire.limits import MAX_SLOTS


class RewardWrapper(Section):
    """One change to the rewards that the learner is given: `clip`, `scale` or `shape`, one of them."""

    clip: tuple[Finite, Finite] | None = None
    """Lowest and highest reward of a step."""
    scale: Finite | None = None
    """Factor of every reward."""
    shape: str | None = None
    """`module:function`, a potential Φ of observations.

    ΓΦ(s') − Φ(s) is added, Φ(s') being 0 where the episode terminated (Ng, Harada and Russell 1999).
    """
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
    """What the actors step."""

    id: str = "CartPole-v1"
    """Any Gymnasium id; `module:Id` imports the module first."""
    kwargs: dict[str, Any] = {}
    """Arguments of the environment's constructor."""
    count: Annotated[int, Field(gt=0, le=MAX_SLOTS)] = 8
    """Environments per actor (N)."""
    vectorise: Literal["auto", "sync", "vector", "async"] = "auto"
    """sync: one loop in the actor; vector: the environment's own vector entry point; async: one process each.

    Auto: vector where the environment has one, else sync.
    """
    max_episode_steps: Positive | None = None
    """Overrides the time limit of the registered environment, in steps."""
    reward: tuple[RewardWrapper, ...] = ()
    """Changes to the rewards that the learner is given, first to last, such as `[{clip = [-1, 1]}, {scale = 0.1}]`; returns of episodes and evaluations stay the environment's own."""
    mask_key: str = ""
    """Where the environment says which actions are allowed.

    A key of its Dict observation, which the policy is then not shown, else of `info`, such as action_mask;
    empty: all are.
    """
