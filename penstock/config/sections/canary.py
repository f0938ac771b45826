"""The trial of a canary against the active version."""

from typing import Annotated

from pydantic import Field

from penstock.config.sections.section import ADVANCED, Positive, PositiveReal, Section


class CanarySection(Section):
    """How a policy server judges a canary against the active version."""

    horizon: Positive = 200
    """Episodes of the canary within which it is judged."""
    false_alarm: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05
    """Probability that a canary no worse than the active version is withdrawn."""
    return_range: tuple[float, float] | None = None
    """Lowest and highest return of an episode; none: from the active version's evaluation."""
    slow_ms: Annotated[PositiveReal, ADVANCED] = 50.0
    """An answer that takes longer in the server is slow, in milliseconds."""
