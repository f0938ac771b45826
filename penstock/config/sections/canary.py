"""The trial of a canary against the active version."""

from typing import Annotated

from pydantic import Field

from penstock.config.sections.section import ADVANCED, Positive, PositiveReal, Section


class CanarySection(Section):
    """How a policy server judges a canary against the active version."""

    horizon: Positive = 200
    """Clients of the canary after which one without a verdict is called undecided; it is judged on."""
    false_alarm: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05
    """Probability that a canary which equals the active version is ever withdrawn, or called better."""
    settle_s: Annotated[PositiveReal, ADVANCED] = 15.0
    """A client's return is compared so long after it began, and 8 and 64 times as long, in seconds."""
    return_range: tuple[float, float] | None = None
    """Lowest and highest return that a client is believed; none: any."""
    slow_ms: Annotated[PositiveReal, ADVANCED] = 50.0
    """An answer that takes longer in the server is slow, in milliseconds."""
