"""Token ids of questions, thoughts and answers, and how they stand in a row.

    with a thought    <bos> question <think> thought </think> = answer
    without one       <bos> question = answer

A thought ends with `</think>`, which is a sampled token; a thought of the full length gets one appended.
Loads no torch.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

import numpy as np
from pydantic import Field, ValidationInfo, field_validator

from penstock.config.algorithm_sections import OnPolicySection
from penstock.config.sections import ADVANCED, Count, Fraction, NonNegative, Positive, PositiveReal
from penstock.config.settings import ConfigurationError, EnvironmentSection
from penstock.protocol.spaces import Discrete, Space
from penstock.workloads.language.settings import GuardSection, kwargs_settings
from penstock.workloads.thoughts.tasks import Example, Task, ask, open_task


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
    """Updates from the last rise of any level until theatre ends the run; none where its gain was lost."""
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


Ids = tuple[int, ...]

SPECIAL: Final = ("<pad>", "<bos>", "<eos>", "<unk>")
"""First words of every tokenizer of `penstock.workloads.language.pretraining.tiny_models`."""
MARKS: Final = ("<think>", "</think>", "=", ".")
"""Begin and end of a thought, the mark before an answer, and a filler without meaning."""


class Layout:
    """The tokens of one task, and the layout of its rows. symbols: the tokens that a thought is made of."""

    def __init__(self, task: Task) -> None:
        shared = set(task.words) & {*SPECIAL, *MARKS}
        if shared:
            raise ValueError(f"words of the task are marks: {sorted(shared)}")
        self.words = (*MARKS, *task.words)
        """All words but the special ones, in the order of the tokenizer."""
        self._ids = {word: number for number, word in enumerate((*SPECIAL, *self.words))}
        self._word = tuple(self._ids)
        self.pad, self.bos = self._ids["<pad>"], self._ids["<bos>"]
        self.think, self.end, self.equals, self.filler = (self._ids[mark] for mark in MARKS)
        self.symbols = self.ids(task.symbols)

    @property
    def vocabulary(self) -> int:
        return len(self._ids)

    def ids(self, words: Sequence[str]) -> Ids:
        """Return the tokens of words; raises ConfigurationError for one that the task does not have."""
        try:
            return tuple(self._ids[word] for word in words)
        except KeyError as error:
            raise ConfigurationError(
                f"environment.kwargs.task: {error.args[0]!r} is in a question or an answer, and not one of "
                "the task's words"
            ) from error

    def text(self, ids: Sequence[int]) -> tuple[str, ...]:
        return tuple(self._word[one] for one in ids)

    def question(self, words: Sequence[str]) -> Ids:
        return (self.bos, *self.ids(words))

    def thought(self, words: Sequence[str]) -> Ids:
        return (*self.ids(words), self.end)

    def content(self, thought: Sequence[int]) -> Ids:
        """Return a thought without the mark that ends it."""
        return tuple(thought[:-1]) if thought and thought[-1] == self.end else tuple(thought)

    def begun(self, question: Ids, thought: Sequence[int] = ()) -> Ids:
        return (*question, self.think, *thought)

    def thinking(self, question: Ids, thought: Sequence[int], answer: Sequence[int]) -> Ids:
        """Return a row with a thought, which is closed where it has no end mark."""
        return (*question, self.think, *self.content(thought), self.end, self.equals, *answer)

    def direct(self, question: Ids, answer: Sequence[int]) -> Ids:
        return (*question, self.equals, *answer)


# ---- `environment.kwargs` of a run of thoughts: the task, the length of thoughts, the start of training.


class Thoughts(GuardSection):
    """The task of a run, its thoughts, and the model that training begins with."""

    task: str = "rings"
    """rings, rings:N:HOPS, or module:function of a task of your own."""
    model: str = ""
    """Folder of the model that training begins with; empty: it is made first, by the warm start."""
    start: Literal["empty", "noise", "random"] = "empty"
    """Thoughts of the warm start, a choice.

    empty: mostly none, the rest with wrong steps. noise: all have wrong steps. random: symbols drawn at
    random, so that no chain is ever shown.
    """
    empty_share: Fraction = 0.7
    """Share of the warm start's thoughts that are empty."""
    wrong_steps: Fraction = 0.3
    """Share of the steps of the others that are wrong."""
    start_updates: Positive = 2500
    """Most updates of the warm start until steps are right; without that the run is refused."""
    corrupted_updates: Positive = 300
    """Updates of the warm start on corrupted thoughts, after the others."""
    hidden: Annotated[int, Field(gt=0, le=4096, multiple_of=8)] = 64
    """Width of that model; a multiple of 8."""
    layers: Annotated[int, Field(gt=0, le=64)] = 2
    """Its layers."""
    thought_tokens: Positive = 8
    """Most tokens of a thought, the mark that ends it among them."""
    group: Positive = 4
    """Thoughts on each question in a fragment."""


def thoughts_section(section: EnvironmentSection) -> Thoughts:
    """Return the section's `kwargs`; raises ConfigurationError with a line per mistake."""
    return kwargs_settings(Thoughts, section.kwargs)


# ---- The environment of thoughts: observations and actions are tokens.

_ASKED: Final = 64
"""Questions of each level from which the lengths of rows and answers are computed."""


def task_of(section: EnvironmentSection) -> tuple[Task, Layout]:
    """Return the task of a run and the layout of its rows; raises ConfigurationError."""
    place = thoughts_section(section).task
    task = open_task(place)
    try:
        return task, Layout(task)
    except ValueError as error:
        raise ConfigurationError(f"environment.kwargs.task={place!r}: {error}") from error


def spaces(section: EnvironmentSection) -> tuple[Space, Space]:
    """Return the spaces of the token at a position and of the next token; raises ConfigurationError."""
    vocabulary = Discrete(task_of(section)[1].vocabulary)
    return vocabulary, vocabulary


def target(section: EnvironmentSection) -> float | None:
    """Return None: `learner.target_return` is the only target. Raises ConfigurationError for wrong kwargs."""
    thoughts_section(section)
    return None


def make(section: EnvironmentSection, count: int, seed: int) -> Any:
    del section, count, seed
    raise ConfigurationError("workload='thoughts': thoughts are generated, there is no environment to step")


def most_tokens(section: EnvironmentSection) -> tuple[int, int]:
    """Return the most steps of a legal thought, and the most tokens of a row with a thought.

    They are those of some questions of every level.
    """
    task, layout = task_of(section)
    examples = sample_questions(task)
    row = max(len(layout.question(one.question)) + len(one.answer) for one in examples)
    # The marks that begin and end a thought, and the one before the answer.
    return max(len(one.steps) for one in examples), row + thoughts_section(section).thought_tokens + 3


def sample_questions(task: Task) -> list[Example]:
    """Return some questions of every level, always the same."""
    random = np.random.default_rng(0)
    return [ask(task, random, level) for level in task.levels for _ in range(_ASKED)]
