"""Bodies of requests and answers; the field names are the API's contract."""

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
_MOST_REWARD: Final = 1e4
_LEAST_LOG_PROB: Final = -60.0
_ROUNDING: Final = 1e-4
_EMBEDDING_SCHEMA: Final = {
    "oneOf": [
        {
            "type": "array",
            "items": {"type": "number"},
            "minItems": WIDTH,
            "maxItems": WIDTH,
        },
        {"type": "string", "contentEncoding": "base64", "minLength": 8192, "maxLength": 8192},
    ],
    "description": "1,536 numbers, or base64 of as many float32, little-endian.",
}


def _array(value: Any) -> NDArray[np.float32]:
    """Return an embedding, float32 [1536], from its JSON value; raises ValueError.

    One with a number beyond ±1 is scaled to unit length, which those of the task's texts have.
    """
    made = (_decoded(value) if isinstance(value, str) else _listed(value)).astype(np.float64)
    wrong = np.flatnonzero(~np.isfinite(made))
    if wrong.size:
        raise ValueError(f"number {wrong[0]} is {made[wrong[0]]}, must be finite")
    largest = float(np.abs(made).max())
    if largest > 1:
        made /= largest
        made /= np.linalg.norm(made)
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
        place = next(number for number, one in enumerate(value) if type(one) is int and abs(one) > 10**300)
        raise ValueError(f"number {place} is of more than 300 digits, must be finite") from error


Embedding = Annotated[Any, PlainValidator(_array), WithJsonSchema(_EMBEDDING_SCHEMA)]
"""float32 [1536], of numbers or of base64."""
RewardedBy = Literal["quality", "source", "ratings"]
"""The reward of a run: the built-in one, a source of scores, or people's ratings."""
Prompt = Annotated[str, Field(min_length=1, max_length=MAX_CHARACTERS)]
ActionNumber = Annotated[int, Field(ge=0, lt=len(MUTATION_TYPES), strict=True)]
CheckpointName = Annotated[
    str,
    Field(
        pattern=r"^[a-z0-9]([a-z0-9-]{0,62}[a-z0-9])?$",
        description="A name, not a path: up to 64 of a-z, 0-9 and '-', with a letter or digit at both ends.",
        examples=["before-the-show"],
    ),
]


class SelectRequest(Body):
    """Requests a mutation. deterministic: the likeliest, not a drawn one; it is not trained on."""

    embedding: Embedding
    deterministic: Annotated[bool, Field(strict=True)] = False


class SelectAnswer(BaseModel):
    """The chosen mutation. ticket: to send with its transition."""

    action: ActionNumber
    mutation_type: str
    log_prob: float
    value: float
    version: int
    ticket: str


class StoreRequest(Body):
    """A transition.

    ticket: of the answer with the action; without it, the newest unused answer for the state and action is
    taken.
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
    """A stored transition. buffer_size: steps since the last update.

    verified: whether it belongs to an answer of this API. duplicate: whether it was stored before.
    """

    stored: Literal[True]
    buffer_size: int
    verified: bool
    duplicate: bool


class UpdateAnswer(BaseModel):
    """Metrics of an update."""

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
    """There were too few steps for an update."""

    message: Literal["Not enough experiences"]
    buffer_size: int


class DistributionRequest(Body):
    """Requests the probability of each mutation."""

    embedding: Embedding


class DistributionAnswer(BaseModel):
    """The probability of each mutation, by its number."""

    probabilities: list[float]
    mutation_types: list[str]
    version: int


class SaveRequest(Body):
    """Requests a checkpoint under a name; without one a name is generated."""

    path: CheckpointName | None = None


class SaveAnswer(BaseModel):
    """A saved checkpoint. path: its name."""

    saved: Literal[True]
    path: str


class LoadRequest(Body):
    """Requests a return to a named checkpoint."""

    path: CheckpointName


class LoadAnswer(BaseModel):
    """The run has returned to a checkpoint. version: of the restored weights.

    given_up: dropped steps that waited for an update.
    """

    loaded: Literal[True]
    version: int
    given_up: int


class HealthAnswer(BaseModel):
    """The API gives actions."""

    status: Literal["ok"]


class NoStatsAnswer(BaseModel):
    """There was no update yet."""

    message: Literal["No training data yet"]


class StatsAnswer(BaseModel):
    """Metrics of the run: rewards of the last 100 episodes of this API, losses of the last 10 updates.

    buffer_size: steps since the last update. open_chains: open episodes. unverified: transitions that belong
    to no answer of this API. lost: steps that were lost with a policy server.
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
    """Requests the embedding of a prompt. encoding: `numbers`, or `base64` of float32, little-endian."""

    prompt: Prompt
    encoding: Literal["numbers", "base64"] = "numbers"


class EmbedAnswer(BaseModel):
    """The embedding of a prompt. offered: which mutations are offered for it."""

    embedding: list[float] | str
    category: str
    offered: list[bool]


class MutateRequest(Body):
    """Requests a mutation of a prompt. start: the prompt before all mutations.

    encoding: of the new prompt's embedding; `none`: no embedding. rewarded: whether to return the reward of
    the step, which may call the source of scores.
    """

    prompt: Prompt
    action: ActionNumber
    start: Prompt | None = None
    encoding: Literal["none", "numbers", "base64"] = "none"
    rewarded: Annotated[bool, Field(strict=True)] = True


class MutateAnswer(BaseModel):
    """A mutated prompt. changed: whether the text differs.

    reward: of the step; null where people rate, or with `rewarded` false.
    """

    prompt: str
    action: int
    mutation_type: str
    reward: float | None
    category: str
    changed: bool
    embedding: list[float] | str | None


class OptimizeRequest(Body):
    """Requests the best prompt within so many mutations.

    explore: mutations are drawn, all of them are on the path, and a rating of the path can be trained on.
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
    """The best prompt, and the path to it. id: for its rating.

    reward: the sum over the path; null where people rate.
    """

    id: str
    prompt: str
    category: str
    reward: float | None
    path: list[PathStep]
    version: int


class RateRequest(Body):
    """Rates a prompt of `/optimize`. score: from 0, bad, to 1, good."""

    id: Annotated[str, Field(min_length=1, max_length=64)]
    score: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False, strict=True)]


class RateAnswer(BaseModel):
    """A stored rating. learned: steps that were stored with it for training."""

    stored: Literal[True]
    learned: int


class WaitingCheck(BaseModel):
    """A step that waits for a check by a person. reward: by the source of scores."""

    id: str
    start: str
    before: str
    after: str
    reward: float


class ChecksAnswer(BaseModel):
    """Waiting checks, oldest first, and how often people agreed with the source of scores.

    every: one of so many scores is checked; 0: none.
    """

    rewarded_by: RewardedBy
    every: int
    checked: int
    agreed: int
    waiting: list[WaitingCheck]


class CheckRequest(Body):
    """Answers a check with the better of its two texts."""

    id: Annotated[str, Field(min_length=1, max_length=64)]
    better: Literal["before", "after"]


class CheckAnswer(BaseModel):
    """A stored check. checked, agreed: numbers of answered checks, and of those that agreed."""

    stored: Literal[True]
    checked: int
    agreed: int
