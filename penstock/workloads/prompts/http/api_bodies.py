"""What requests hold, and what answers say; field names are those that programs know."""

import base64
import binascii
from typing import Annotated, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, PlainValidator, WithJsonSchema

from penstock.gateway.frame.requests import Body
from penstock.workloads.prompts.embeddings import WIDTH
from penstock.workloads.prompts.features import MAX_CHARACTERS, MUTATION_TYPES

MAX_STEPS: Final = 8
"""Most mutations of a path."""
_BYTES: Final = 4 * WIDTH
_LARGEST: Final = 1.0
"""Of a number of an embedding: those of texts are of unit length."""
_MOST_REWARD: Final = 1e4
_LEAST_LOG_PROB: Final = -60.0
_ROUNDING: Final = 1e-4
_EMBEDDING_SCHEMA: Final = {
    "oneOf": [
        {
            "type": "array",
            "items": {"type": "number", "minimum": -_LARGEST, "maximum": _LARGEST},
            "minItems": WIDTH,
            "maxItems": WIDTH,
        },
        {"type": "string", "contentEncoding": "base64", "minLength": 8192, "maxLength": 8192},
    ],
    "description": "1,536 numbers, or base64 of as many float32, little-endian.",
}


def _array(value: Any) -> NDArray[np.float32]:
    """Return an embedding, float32 [1536], of what JSON has; raises ValueError."""
    made = _decoded(value) if isinstance(value, str) else _listed(value)
    beyond = np.flatnonzero(~(np.abs(made) <= _LARGEST))
    if beyond.size:
        raise ValueError(f"number {beyond[0]} is {made[beyond[0]]:.15g}, must be from -1 to 1")
    return made.astype(np.float32)


def _decoded(value: str) -> NDArray[np.floating[Any]]:
    try:
        raw = base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError("is no base64; send an array of 1,536 numbers, or base64 of float32") from error
    if len(raw) != _BYTES:
        raise ValueError(f"holds {len(raw)} bytes, must be 1,536 float32 ({_BYTES} bytes)")
    return np.frombuffer(raw, "<f4")


def _listed(value: Any) -> NDArray[np.floating[Any]]:
    if not isinstance(value, list):
        raise ValueError("must be an array of 1,536 numbers, or base64 of float32")  # noqa: TRY004 - pydantic's
    if len(value) != WIDTH:
        raise ValueError(f"holds {len(value)} numbers, must be {WIDTH}")
    kinds = set(map(type, value))
    if not kinds <= {float, int}:
        place = next(number for number, one in enumerate(value) if type(one) not in {float, int})
        raise ValueError(f"number {place} is no number: send numbers alone")
    try:
        return np.array(value, np.float64)
    except OverflowError as error:
        raise ValueError("holds a number of more than 15 digits, must be from -1 to 1") from error


Embedding = Annotated[Any, PlainValidator(_array), WithJsonSchema(_EMBEDDING_SCHEMA)]
"""float32 [1536], of numbers or of base64."""
RewardedBy = Literal["quality", "source", "ratings"]
"""What gives the rewards of a run: the workload's own, another source, or people."""
Prompt = Annotated[str, Field(min_length=1, max_length=MAX_CHARACTERS)]
ActionNumber = Annotated[int, Field(ge=0, lt=len(MUTATION_TYPES), strict=True)]
CheckpointName = Annotated[
    str,
    Field(
        pattern=r"^[a-z0-9]([a-z0-9-]{0,62}[a-z0-9])?$",
        description="A name, not a place: up to 64 of a-z, 0-9 and '-', with a letter or digit at both ends.",
        examples=["before-the-show"],
    ),
]


class SelectRequest(Body):
    """Asks for a mutation. deterministic: the likeliest instead of a drawn one, which is not learned from."""

    embedding: Embedding
    deterministic: Annotated[bool, Field(strict=True)] = False


class SelectAnswer(BaseModel):
    """A mutation that was chosen. ticket: to be sent back with the transition."""

    action: ActionNumber
    mutation_type: str
    log_prob: float
    value: float
    version: int
    ticket: str


class StoreRequest(Body):
    """A transition: the action that was taken in a state, and what came of it.

    ticket: of the answer that named the action; without it the answer is looked for.
    """

    state: Embedding
    action: ActionNumber
    reward: Annotated[float, Field(ge=-_MOST_REWARD, le=_MOST_REWARD, allow_inf_nan=False, strict=True)]
    next_state: Embedding
    done: Annotated[bool, Field(strict=True)]
    log_prob: Annotated[float, Field(ge=_LEAST_LOG_PROB, le=_ROUNDING, allow_inf_nan=False, strict=True)]
    value: Annotated[float, Field(allow_inf_nan=False, strict=True)] = 0.0
    ticket: Annotated[str, Field(max_length=64)] = ""


class StoreAnswer(BaseModel):
    """A transition that was taken in. buffer_size: steps since the last update.

    verified: whether it belongs to an answer that was given here. duplicate: it had been stored before.
    """

    stored: Literal[True]
    buffer_size: int
    verified: bool
    duplicate: bool


class UpdateAnswer(BaseModel):
    """Figures of an update."""

    policy_loss: float | None
    value_loss: float | None
    entropy: float | None
    approx_kl: float | None
    clip_fraction: float | None
    learning_rate: float | None
    buffer_size: int
    update_count: int
    version: int
    steps: int


class TooFewAnswer(BaseModel):
    """There was too little to learn from."""

    message: Literal["Not enough experiences"]
    buffer_size: int


class DistributionRequest(Body):
    """Asks how likely each mutation is."""

    embedding: Embedding


class DistributionAnswer(BaseModel):
    """How likely each mutation is, by its number."""

    probabilities: list[float]
    mutation_types: list[str]
    version: int


class SaveRequest(Body):
    """Asks for a checkpoint under a name; without one a name is made."""

    path: CheckpointName | None = None


class SaveAnswer(BaseModel):
    """A checkpoint that is kept. path: its name."""

    saved: Literal[True]
    path: str


class LoadRequest(Body):
    """Asks to go back to a named checkpoint."""

    path: CheckpointName


class LoadAnswer(BaseModel):
    """The run has gone back. version: under which the weights answer.

    given_up: steps that waited for an update.
    """

    loaded: Literal[True]
    version: int
    given_up: int


class HealthAnswer(BaseModel):
    """Actions are given."""

    status: Literal["ok"]


class NoStatsAnswer(BaseModel):
    """Nothing was learned from yet."""

    message: Literal["No training data yet"]


class StatsAnswer(BaseModel):
    """Figures of the run; rewards of the last 100 episodes that ended here, losses of the last 10 updates.

    buffer_size: steps since the last update. open_chains: episodes that go on. unverified: transitions that
    belong to no answer that was given here. lost: steps that a policy server took with it when it ended.
    """

    total_updates: int
    total_episodes: int
    avg_reward: float | None
    max_reward: float | None
    avg_policy_loss: float | None
    avg_value_loss: float | None
    avg_entropy: float | None
    avg_kl: float | None
    buffer_size: int
    open_chains: int
    unverified: int
    lost: int


class EmbedRequest(Body):
    """Asks for the embedding of a prompt. encoding: `numbers`, or `base64` of float32, little-endian."""

    prompt: Prompt
    encoding: Literal["numbers", "base64"] = "numbers"


class EmbedAnswer(BaseModel):
    """A prompt as numbers. offered: which mutations it implies."""

    embedding: list[float] | str
    category: str
    offered: list[bool]


class MutateRequest(Body):
    """Asks what a mutation makes of a prompt. start: the prompt that was there before all mutations.

    encoding: that of the embedding of what is made; `none`: without it. rewarded: whether to say what the
    step is worth; somebody who only looks need not ask the source of rewards.
    """

    prompt: Prompt
    action: ActionNumber
    start: Prompt | None = None
    encoding: Literal["none", "numbers", "base64"] = "none"
    rewarded: Annotated[bool, Field(strict=True)] = True


class MutateAnswer(BaseModel):
    """A mutated prompt. changed: whether the text is another one.

    reward: what the step is worth; null where people rate, or no rating was asked for.
    """

    prompt: str
    action: int
    mutation_type: str
    reward: float | None
    category: str
    changed: bool
    embedding: list[float] | str | None


class OptimizeRequest(Body):
    """Asks for the best prompt within so many mutations.

    explore: mutations are drawn instead, all of them are on the path, and a rating of it can be learned from.
    """

    prompt: Prompt
    steps: Annotated[int, Field(ge=1, le=MAX_STEPS, strict=True)] = 5
    explore: Annotated[bool, Field(strict=True)] = False


class PathStep(BaseModel):
    """One mutation on a path."""

    action: int
    mutation_type: str
    prompt: str
    reward: float | None
    probabilities: list[float]


class OptimizeAnswer(BaseModel):
    """The best prompt that was seen, and the path to it. id: under which it can be rated.

    reward: the sum of the path's; null where people rate.
    """

    id: str
    prompt: str
    category: str
    reward: float | None
    path: list[PathStep]
    version: int


class RateRequest(Body):
    """Says what a prompt is worth that `/optimize` has answered with. score: from 0, bad, to 1, good."""

    id: Annotated[str, Field(min_length=1, max_length=64)]
    score: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False, strict=True)]


class RateAnswer(BaseModel):
    """A rating that is kept. learned: steps that were stored with it, to be learned from."""

    stored: Literal[True]
    learned: int


class WaitingCheck(BaseModel):
    """A step that a person is asked about. reward: what the source of rewards said of it."""

    id: str
    start: str
    before: str
    after: str
    reward: float


class ChecksAnswer(BaseModel):
    """What waits for a person, oldest first, and how far people agree with the source of rewards.

    every: scores of which one is checked; 0: none is.
    """

    rewarded_by: RewardedBy
    every: int
    checked: int
    agreed: int
    waiting: list[WaitingCheck]


class CheckRequest(Body):
    """Says which of the two texts of a check is the better prompt."""

    id: Annotated[str, Field(min_length=1, max_length=64)]
    better: Literal["before", "after"]


class CheckAnswer(BaseModel):
    """A check that is kept. checked, agreed: so many checks there were, and so many that agreed."""

    stored: Literal[True]
    checked: int
    agreed: int
