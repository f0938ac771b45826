"""What the actors step."""

from typing import Annotated, Any, Literal

from pydantic import Field

from penstock.runtime.sections.section import Positive, Section
from penstock.wire.limits import MAX_SLOTS


class EnvironmentSection(Section):
    """What the actors step."""

    id: str = "CartPole-v1"
    """Any Gymnasium id; `module:Id` imports the module first."""
    kwargs: dict[str, Any] = {}
    """Arguments of the environment's constructor."""
    count: Annotated[int, Field(gt=0, le=MAX_SLOTS)] = 8
    """Environments per actor (N)."""
    vectorise: Literal["auto", "sync", "vector", "async"] = "auto"
    """sync: one loop in the actor; vector: the environment's own vector entry point; async: one process each; auto: vector where the environment has one, else sync."""
    max_episode_steps: Positive | None = None
    """Overrides the time limit of the registered environment, in steps."""
    mask_key: str = ""
    """Where the environment says which actions are allowed: a key of its Dict observation, which the policy is then not shown, else of `info`, such as action_mask; empty: all are."""
