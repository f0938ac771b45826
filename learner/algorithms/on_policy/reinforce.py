"""REINFORCE with a learned baseline (Williams 1992), one gradient step on each batch, nothing clipped.

    ∇ = E[ ∇log π(a_t) (G_t − V_t) ] + entropy bonus,      value loss = ½ E[ (G_t − V)² ]

G_t is the discounted return to the end of the episode, with V of the last observation where the unroll or
a time limit ends first; or, with advantage=gae, the λ-return. Nothing corrects for experience of older
policies: `algorithm.staleness=0` makes the estimate exact, small values make it slightly biased.
"""

from torch import Tensor

from penstock.config.settings import ReinforceSection
from penstock.learner.algorithms.on_policy.on_policy import OnPolicy
from penstock.learner.algorithms.shared.advantage import Advantages, Unrolls, gae
from penstock.learner.algorithms.shared.loss import Sloped, Surrogate, coupled, policy_gradient
from penstock.learner.algorithms.shared.rows import Rows
from penstock.learner.algorithms.shared.schedule import ScheduleValues
from penstock.policy.numbers import Numbers


class Reinforce(OnPolicy[ReinforceSection]):
    """The plain policy gradient."""

    def _advantages(self, unrolls: Unrolls, log_ratios: Tensor) -> Advantages:
        section = self.section
        # A_t = Σ (γλ)^k δ_{t+k} telescopes to G_t − V_t at λ = 1.
        gae_lambda = 1.0 if section.advantage == "monte-carlo" else section.gae_lambda
        return gae(*unrolls, discount=section.discount, gae_lambda=gae_lambda)

    def _surrogate(self, behaviour: Tensor, proximal: Tensor, advantage: Tensor) -> Surrogate:
        return coupled(behaviour, advantage)

    def _policy_loss(self, log_prob: Numbers, rows: Rows, scheduled: ScheduleValues) -> Sloped:
        return policy_gradient(log_prob, rows.weighted_advantage, rows.total)
