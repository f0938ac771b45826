"""Evidence that may be looked at at any time, gathered for ever, and never used up: an e-process.

    M_t  =  mean over b of  Σ_{j ≤ t} w_j · ∏_{i=j..t} (1 + b·g_i)   +   1/(t + 1),      w_j = 1 / (j·(j + 1))

g_i ≥ −1 is what the i-th bet gains, b runs over BETS, and w_j is the part of the capital that starts to bet
at bet j; what has not started yet is 1 − Σ_{j ≤ t} w_j = 1/(t + 1).

*The bound.* Suppose that E[g_i | all before] ≤ 0, which is what "nothing is wrong" means to the bettor.
Each factor is at least 1 − b > 0 and has conditional mean at most 1, so each product is a non-negative
supermartingale from j on, and 1 before. M is a mixture of them with weights of sum 1: a non-negative
supermartingale with M_0 = 1. By Ville's inequality the chance that M_t ≥ 1/α at *any* t, the whole future
included, is at most α. It needs neither a number of looks that is fixed beforehand nor independence.

*Why it does not tire.* A single capital process that has lost for a year must win it all back. Here, at every
time, a part of 1/(j·(j + 1)) starts anew: what goes wrong at bet j is found as fast as at the start, but for
2·log j in the logarithm of the capital. The mixture over starts is that of e-detectors (Shin, Ramdas,
Rinaldo, "E-detectors", 2023); the bets that of Waudby-Smith and Ramdas, J. R. Stat. Soc. B 86 (2024), section
4.
"""

from dataclasses import dataclass
from typing import Final

BETS: Final = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95)
"""Below 1: no single loss ruins the capital."""
_MOST: Final = 1e300
"""Capital is cut off here, which only lowers it."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """The capital of one question.

    count: bets that were made.   capital: of what has started, for each of BETS.
    """

    count: int = 0
    capital: tuple[float, ...] = (0.0,) * len(BETS)

    @property
    def value(self) -> float:
        """M_t: 1 at the start; at least x with a probability of at most 1/x, ever, while nothing is wrong."""
        return sum(self.capital) / len(BETS) + 1.0 / (self.count + 1)

    def bet(self, gain: float) -> "Evidence":
        """Return the evidence after one more bet; raises ValueError for a gain below −1."""
        if not gain >= -1.0:
            raise ValueError(f"gain={gain}: must be a number of at least -1")
        count = self.count + 1
        start = 1.0 / (count * (count + 1))
        bets = zip(self.capital, BETS, strict=True)
        return Evidence(count, tuple(min(_MOST, (own + start) * (1.0 + bet * gain)) for own, bet in bets))


NONE: Final = Evidence()
"""That of a question before its first bet."""
