"""IMPALA: V-trace actor-critic (Espeholt et al. 2018), one gradient step on each batch, nothing clipped.

With π the policy at the start of the batch, which is also the one that is trained, and μ the one that acted:

    ρ_t = min(ρ̄, π/μ),  c_t = λ min(c̄, π/μ)
    v_t = V_t + ρ_t (r_t + γ V_{t+1} − V_t) + γ c_t (v_{t+1} − V_{t+1})                       (eq. 1)
    ∇ = E[ ρ_t ∇log π(a_t) (r_t + γ v_{t+1} − V_t) ] + entropy bonus                 (section 4.2)
    value loss = ½ E[ (v_t − V)² ]

The published loss is a sum over the steps of a batch, this one a mean; the optimiser is Adam, to whom a
constant factor of the loss is nothing, instead of RMSProp.
"""

from torch import Tensor

from penstock.config.settings import ImpalaSection
from penstock.learner.algorithms.on_policy.on_policy import OnPolicy
from penstock.learner.algorithms.shared.advantage import Advantages, Unrolls, vtrace
from penstock.learner.algorithms.shared.loss import Sloped, Surrogate, policy_gradient, weighted
from penstock.learner.algorithms.shared.rows import Rows
from penstock.learner.algorithms.shared.schedule import ScheduleValues
from penstock.policy.numbers import Numbers


class Impala(OnPolicy[ImpalaSection]):
    """V-trace corrects for experience of older policies, where PPO holds on to a trust region."""

    def _advantages(self, unrolls: Unrolls, log_ratios: Tensor) -> Advantages:
        section = self.section
        return vtrace(
            *unrolls,
            log_ratios,
            discount=section.discount,
            gae_lambda=section.gae_lambda,
            rho_clip=section.rho_clip,
            c_clip=section.c_clip,
        )

    def _surrogate(self, behaviour: Tensor, proximal: Tensor, advantage: Tensor) -> Surrogate:
        return weighted(behaviour, proximal, advantage, self.section.rho_clip)

    def _policy_loss(self, log_prob: Numbers, rows: Rows, scheduled: ScheduleValues) -> Sloped:
        return policy_gradient(log_prob, rows.weighted_advantage, rows.total)
