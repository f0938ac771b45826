"""What is asked of the section of every algorithm."""

from typing import ClassVar

from penstock.config.sections.policy_section import PolicySection
from penstock.config.sections.section import Fraction, Section


class AlgorithmSection(Section):
    """What the core reads of every algorithm."""

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
        """Return the policy that the algorithm learns, where another was asked for."""
        return section
