"""Whether estimates may be believed: a refusal is an answer as well."""

from typing import Final

import numpy as np

from penstock.workloads.goals.off_policy.decisions import Decisions
from penstock.workloads.goals.off_policy.estimators import Estimate, Estimates, estimate

LEAST_EFFECTIVE: Final = 50.0
"""Episodes, as an effective sample size, below which nothing is judged."""
_MOST_ERRORS: Final = 4.0
"""Standard errors that the mean ratio may lie from 1."""


class TooLittle(Exception):
    """The log does not say what the policy would have earned; the text says why and what would."""


def judge(decisions: Decisions, discount: float) -> Estimates:
    """Return estimates that may be believed; raises TooLittle where there are none.

    decisions: of whole episodes. discount: γ, from 0 to 1.
    """
    count = decisions.episodes
    if count < LEAST_EFFECTIVE:
        raise TooLittle(
            f"{count} episodes with known propensities, fewer than {LEAST_EFFECTIVE:.0f}: log more of them"
        )
    _check_propensities(decisions)
    found = estimate(decisions, discount)
    if found.effective < LEAST_EFFECTIVE:
        raise TooLittle(
            f"effective sample size {found.effective:.1f} of {count} episodes, below {LEAST_EFFECTIVE:.0f}: "
            "the policy rarely does what was logged; log more, or judge a policy that is closer to the "
            "logging one"
        )
    if _is_off(found.mean_ratio):
        raise TooLittle(
            f"π / μ has a mean of {found.mean_ratio.value:.3f} ± "
            f"{found.mean_ratio.standard_error:.3f} instead of 1: the propensities do not belong to the "
            "actions, or the policy does what was never tried"
        )
    return found


def _check_propensities(decisions: Decisions) -> None:
    """Hold the log against itself: 1{a was done} / μ(a) has mean of 1, or less where a cannot be.

    A join by the wrong key is found so whatever policy is judged: its own ratios may have a mean of 1.
    """
    if decisions.action is None:
        return
    for action in np.unique(decisions.action):
        ratio = np.where(decisions.action == action, np.exp(-decisions.log_logged), 0.0)
        error = float(ratio.std(ddof=1)) / np.sqrt(len(ratio))
        above = float(ratio.mean()) - 1
        if above > max(_MOST_ERRORS * error, 1e-6):
            raise TooLittle(
                f"the propensities do not belong to the actions: by them action {action} was done "
                f"{above + 1:.2f} times (± {error:.2f}) as often as it can have been; were they joined by "
                "the right key?"
            )


def _is_off(mean: Estimate) -> bool:
    error = mean.standard_error
    return abs(mean.value - 1) > max(_MOST_ERRORS * error, 1e-6)
