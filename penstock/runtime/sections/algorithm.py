"""How the learner learns: a section for each algorithm, chosen by `algorithm.name`."""

from typing import Annotated, Literal

from pydantic import Field

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


class CloneSection(Section):
    """How a policy is cloned from a recording (`penstock train --from`): the actions in it are made likely."""

    name: Literal["clone"] = "clone"
    """Which algorithm."""
    batch_steps: Positive = 1024
    """Steps of one update."""
    staleness: Literal[1] = 1
    """Nobody acts while a recording is read, so nothing lags behind."""
    passes: Positive = 20
    """Passes over the recording, each in another order."""
    minibatches: Positive = 4
    """Gradient steps of an update."""
    validation: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1
    """Share of the recording's fragments that is never trained on, and measured after every update."""
    learning_rate: NonNegative = 1e-3
    """Step size of Adam."""
    adam_epsilon: NonNegative = 1e-8
    """ε of Adam."""
    max_gradient_norm: NonNegative = 0.0
    """Gradients are scaled down to this norm; 0: off."""
    value_coefficient: NonNegative = 0.0
    """Weight of fitting the critic to the returns; 0: it is left as it is."""
    discount: Fraction = 0.99
    """γ of those returns, per step."""
