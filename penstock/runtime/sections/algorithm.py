"""How the learner learns: a section for each algorithm, chosen by `algorithm.name`."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from penstock.runtime.sections.policy import PolicySection
from penstock.runtime.sections.replay import DQNSection, SACSection
from penstock.runtime.sections.section import Fraction, NonNegative, Positive, Section


class AlgorithmSection(Section):
    """How the learner learns."""

    name: Literal["ppo"] = "ppo"
    """Which algorithm."""
    batch_steps: Positive = 2048
    """Steps of one update (B)."""
    staleness: Annotated[int, Field(ge=0)] = 1
    """Updates that experience may lag behind when it is begun (S); 0: lock-step."""
    stale_after: Positive | None = None
    """Fragments older than this many updates at their turn are dropped as stale (H); default 4(S+1)."""
    epochs: Positive = 4
    """Passes over each batch."""
    minibatches: Positive = 4
    """Gradient steps per epoch."""
    discount: Fraction = 0.99
    """γ, per step."""
    gae_lambda: Fraction = 0.95
    """λ of GAE and V-trace."""
    advantage: Literal["gae", "vtrace"] = "gae"
    """How advantages and value targets are estimated, once per batch with the current critic."""
    objective: Literal["decoupled", "coupled"] = "decoupled"
    """decoupled: clip around the policy at batch start (Hilton et al. 2021); coupled: around the behaviour policy."""
    rho_clip: NonNegative = 1.0
    """ρ̄ of V-trace."""
    c_clip: NonNegative = 1.0
    """c̄ of V-trace."""
    behaviour_weight_cap: NonNegative = 5.0
    """Largest π_prox/μ of the decoupled objective."""
    clip_range: NonNegative = 0.2
    """ε of the surrogate."""
    clip_schedule: Literal["constant", "linear"] = "constant"
    """linear: ε falls to 0 over `learner.total_steps`."""
    value_clip: NonNegative | None = None
    """Largest change of a value in one update; none: off."""
    value_coefficient: NonNegative = 0.5
    """Weight of the value loss."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus."""
    normalise_advantages: bool = True
    """Standardise the advantages of each batch over its valid steps."""
    scale_rewards: bool = False
    """Divide rewards by the running standard deviation of the discounted return (stays in the learner)."""
    learning_rate: NonNegative = 3e-4
    """Step size of Adam."""
    learning_rate_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate over `learner.total_steps`."""
    warmup_updates: Annotated[int, Field(ge=0)] = 0
    """Updates over which the learning rate rises from 0."""
    adam_epsilon: NonNegative = 1e-5
    """ε of Adam."""
    max_gradient_norm: NonNegative = 0.5
    """Gradients are scaled down to this norm; 0: off."""
    target_kl: NonNegative | None = None
    """Stop the epochs of an update when KL(π_prox‖π_θ) exceeds 1.5 times this; none: off."""

    @property
    def lock_step(self) -> bool:
        """S = 0."""
        return self.staleness == 0

    @property
    def begun_lag(self) -> float:
        """S."""
        return self.staleness

    @property
    def update_steps(self) -> int:
        """B."""
        return self.batch_steps

    def policy_section(self, section: PolicySection) -> PolicySection:
        """The policy as it was asked for."""
        return section


def _tag(value: Any) -> str:
    """The algorithm that a section is for, written or made."""
    name = value.get("name") if isinstance(value, Mapping) else getattr(value, "name", None)
    return "ppo" if name is None else str(name)


AnyAlgorithm = Annotated[
    Annotated[AlgorithmSection, Tag("ppo")]
    | Annotated[DQNSection, Tag("dqn")]
    | Annotated[SACSection, Tag("sac")],
    Field(description="How the learner learns; `algorithm.name` says which of the sections it is."),
    Discriminator(_tag),
]
"""The section of any algorithm that there is; the default is PPO's."""
