"""What the actors step."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from penstock.config.sections.section import ADVANCED, Fraction, Positive, Section
from penstock.protocol.limits import MAX_SLOTS


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


class AtariSection(Section):
    """How an Atari game is shown and played, for ids `ALE/…`, after Mnih et al. 2015.

    A step shows the maximum of its last two frames, grey, 84 by 84.
    """

    frame_skip: Annotated[int, Field(gt=0, le=64)] = 4
    """Frames of the console in a step; the action is held meanwhile."""
    noop_max: Annotated[int, Field(gt=0, le=1000)] = 30
    """Most frames without an action that a game begins with; how many, at least one, is drawn."""
    episodic_life: bool = True
    """Whether a lost life ends an episode of training; evaluations always play whole games."""
    sticky_actions: Fraction = 0.0
    """Probability that a frame repeats the action before it; Machado et al. 2018 propose 0.25."""


class EnvironmentSection(Section):
    """Describes the environments that actors step."""

    id: str = "CartPole-v1"
    """Any Gymnasium id; `module:Id` imports the module first."""
    kwargs: dict[str, Any] = {}
    """Arguments of the environment's constructor."""
    count: Annotated[int, Field(gt=0, le=MAX_SLOTS)] = 8
    """Environments per actor (N)."""
    vectorise: Literal["auto", "sync", "vector", "async", "envpool"] = "auto"
    """sync: one loop; async: processes; envpool: threads; vector: its own entry; auto: vector, else sync."""
    max_episode_steps: Positive | None = None
    """Overrides the time limit of the registered environment, in steps."""
    reward: tuple[RewardWrapper, ...] = ()
    """Changes to the learner's rewards, first to last, such as `[{clip = [-1, 1]}, {scale = 0.1}]`."""
    mask_key: str = ""
    """Key of the Dict observation, or else of `info`, that holds the allowed actions; empty: all are."""
    atari: Annotated[AtariSection | None, ADVANCED] = None
    """How an Atari game (`ALE/…`) is shown and played, such as `{frame_skip = 4, episodic_life = true}`."""

    def for_evaluation(self) -> Self:
        """Return what an evaluation plays: one seed for each episode where that can be, and whole games."""
        changes: dict[str, Any] = {}
        if self.vectorise in ("auto", "async"):
            changes["vectorise"] = "sync"
        if self.atari is not None:
            changes["atari"] = self.atari.model_copy(update={"episodic_life": False})
        return self.model_copy(update=changes)
