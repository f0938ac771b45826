"""How thoughts are learned: the section of `algorithm.name = "thought_reinforce"`. Loads no torch."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from penstock.config.algorithm_sections import OnPolicySection
from penstock.config.sections import ADVANCED, Count, Fraction, NonNegative, PositiveReal


class ThoughtReinforceSection(OnPolicySection):
    """REINFORCE of thoughts: what a thought adds to the log-probability of the answer is its reward."""

    can_share: ClassVar[bool] = False
    can_compile: ClassVar[bool] = False
    can_round: ClassVar[bool] = False

    name: Literal["thought_reinforce"] = "thought_reinforce"
    """Which algorithm, a choice."""
    discount: Fraction = 1.0
    """γ, per token of a thought."""
    baseline: Literal["group", "learned", "both", "none"] = "group"
    """A choice. group: rewards are less the mean of their question's; learned: less a network's guess."""
    advantage: Literal["return", "gae"] = "return"
    """A choice. return: the reward less the baseline; gae: GAE over the tokens of a thought."""
    baseline_layers: Annotated[int, Field(gt=0, le=16)] = 2
    """Layers of the learned baseline."""
    baseline_hidden: Annotated[int, Field(gt=0, le=4096)] = 256
    """Its width."""
    baseline_reads: Literal["token", "pooled"] = "token"
    """What it reads, a choice: the state at each token, or the mean of the states up to there."""
    answer_coefficient: NonNegative = 1.0
    """λ₁, a ratio: weight of the loss of the answer behind a thought."""
    direct_coefficient: NonNegative = 1.0
    """λ₀, a ratio: weight of the loss of the answer without one; with 0 it decays, and gains are sabotage."""
    kl_coefficient: NonNegative = 0.0
    """Weight of KL(π‖start) of thoughts, per nat; 0: nothing holds the policy to its start."""
    reward_clip: PositiveReal = 5.0
    """Rewards lie within ± this many nats."""
    reward_from: Literal["own", "another"] = "own"
    """A choice. another: each thought gets the reward of another question's; a validation must notice."""
    behaviour_weight_cap: Annotated[NonNegative, ADVANCED] = 2.0
    """Largest π/μ of a token, a ratio of probabilities."""
    learning_rate: NonNegative = 1e-3
    """Step size of AdamW, per update."""
    learning_rate_floor: Fraction = 0.0
    """A falling learning rate ends at this share of the first one."""
    max_gradient_norm: NonNegative = 1.0
    """Gradients are scaled down to this norm; 0: off."""
    adam_epsilon: Annotated[NonNegative, ADVANCED] = 1e-8
    """ε of AdamW, in the unit of a gradient."""
    entropy_coefficient: float = 0.01
    """Weight of the entropy bonus, per nat."""
    entropy_decay: Annotated[float, Field(gt=0.0, le=1.0)] = 0.9995
    """The weight of the entropy bonus is multiplied by this after every update, a ratio; 1: constant."""
    entropy_floor: Annotated[NonNegative, ADVANCED] = 0.001
    """The decaying weight of the entropy bonus stays at or above this, per nat."""
    normalise_advantages: bool = False
    """Divide the advantages of a batch by their deviation; yes or no."""
    scale_rewards: Literal[False] = False
    """Never: a reward is nats."""
    validate_every: Count = 50
    """Updates between two validations of the thoughts; 0: none."""
    validation_questions: Annotated[int, Field(ge=32, le=16_384)] = 256
    """Held-out questions of a validation."""
    theatre_grace: Count = 150
    """Updates before theatre ends the run, unless a gain above 0.1 nats was there and is lost."""
    ends_theatre: bool = True
    """End the run when its thoughts are theatre; no: only say so."""

    @field_validator("advantage")
    @classmethod
    def _gae_has_a_critic(cls, advantage: str, info: ValidationInfo) -> str:
        baseline = info.data.get("baseline", "learned")
        if advantage == "gae" and baseline not in ("learned", "both"):
            raise ValueError(f"needs a learned baseline, and baseline={baseline!r}; say learned or both")
        return advantage


# ---- Settings of thoughts of any task: the layer under file, environment and flags.


def for_environment(environment_id: str, algorithm: str) -> dict[str, Any]:
    """Return the defaults of a run, as nested settings. algorithm: "ppo" means REINFORCE of thoughts."""
    del environment_id
    layers: dict[str, Any] = {
        "environment": {"count": 128},
        "policy": {"kwargs": {"lora": False}},
        "actor": {"count": 1, "unroll_length": 25},
        "learner": {
            "device": "cpu",  # all that it can learn on; `auto` is a GPU where there is one
            "total_steps": 10_000_000,
            "total_updates": 400,
            "stop_at_target": False,
        },
        "evaluation": {"episodes": 256, "deterministic": False, "both": True},
    }
    return layers | ({"algorithm": {"name": "thought_reinforce"}} if algorithm == "ppo" else {})
