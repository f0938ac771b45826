"""Sources of rewards: for each sample a reward, or None where the source gives none.

All errors are RewardError.
"""

import hashlib
import inspect
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from penstock.config.workload import load
from penstock.protocol.append import fields
from penstock.protocol.limits import MAX_MESSAGE_BYTES, MIB
from penstock.protocol.refusal import Unfit
from penstock.v1 import reward_pb2 as pb
from penstock.workloads.language.prompt import Message, Prompt


class RewardError(Exception):
    """A call for rewards failed."""


class BadReward(RewardError, ValueError):
    """The source returned something that is no reward."""


class BadSample(RewardError, ValueError):
    """A sample that cannot be scored."""


class Unavailable(RewardError, OSError):
    """No answer before the deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A response to a prompt, as text, as token ids of the reward model's own tokenizer, or both.

    A reward model reads the ids where `response_ids` has any: they are the sampled ones, and the text might
    be tokenised into others. Functions and endpoints read the text. cut_short: the length limit ended the
    response.
    """

    prompt: Prompt = ""
    response: str = ""
    prompt_ids: tuple[int, ...] = ()
    response_ids: tuple[int, ...] = ()
    cut_short: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredBy:
    """The model or function that gave rewards. sha256: of its weights or source code, "" where unknown.

    mean, std: of its scores on a reference set; None where not measured.
    """

    name: str
    sha256: str = ""
    mean: float | None = None
    std: float | None = None


@dataclass(frozen=True, slots=True)
class Rewards:
    """A reward, or None, for each sample in order."""

    values: tuple[float | None, ...]
    by: ScoredBy


class RewardSource(Protocol):
    """Gives rewards; used by any number of threads."""

    def score(self, samples: Sequence[Sample]) -> Rewards:
        """Return their rewards; raises BadReward, BadSample, Unavailable."""

    def close(self) -> None:
        """Let go of connections; a call that waits raises Unavailable."""


def checked(values: Sequence[Any], expected: int, source: str) -> tuple[float | None, ...]:
    """Return the values as rewards; raises BadReward, which names the first value that is no reward."""
    if len(values) != expected:
        raise BadReward(f"{source}: {len(values)} rewards for {expected} samples")
    return tuple(_reward(value, index, source) for index, value in enumerate(values))


def _reward(value: Any, index: int, source: str) -> float | None:
    if value is None:
        return None
    if getattr(value, "ndim", None) == 0:  # of NumPy or torch
        value = value.item()
    if not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise BadReward(
            f"{source}: reward {index} is {value!r:.80}: give a finite number, or none where there is none"
        )
    return float(value)


# ---- Rewards from a Python function: `module:function` takes (prompts, responses) and returns a list.

Function = Callable[[list[Prompt], list[str]], Sequence[float | None]]


class CallableRewards:
    """Calls a user's function for rewards, from one thread at a time."""

    def __init__(self, path: str) -> None:
        """Raise ConfigurationError for a path that names no function."""
        self._function: Function = load(path)
        try:
            file = inspect.getsourcefile(self._function)
        except TypeError:
            file = None
        digest = "" if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()
        self._by = ScoredBy(name=path, sha256=digest)
        self._turn = threading.Lock()

    def score(self, samples: Sequence[Sample]) -> Rewards:
        prompts = [sample.prompt for sample in samples]
        responses = [sample.response for sample in samples]
        with self._turn:
            values: Any = self._function(prompts, responses)
        if hasattr(values, "tolist"):  # of arrays and tensors
            values = values.tolist()
        source = self._by.name
        if not isinstance(values, list | tuple):
            raise BadReward(
                f"{source}: returned {type(values).__name__}: return a list with a reward for each response"
            )
        return Rewards(checked(values, len(samples), source), self._by)

    def close(self) -> None:
        """Do nothing: nothing is held."""


# ---- Samples and rewards as messages, and limits of a request that are checked before it is parsed.

MAX_REWARD_SAMPLES: Final = 1024
"""Most samples of one call of the reward service."""
MAX_SAMPLE_BYTES: Final = MIB
"""Most bytes of text in a sample: no tokenizer is shown more."""
MAX_FIELDS: Final = 4096
"""Fields of one sample: the messages of its conversation."""
MAX_TURNS: Final = 2**15
"""Messages of all conversations of one call."""
_SAMPLES: Final = pb.ScoreRequest.SAMPLES_FIELD_NUMBER
_CONVERSATION: Final = pb.RewardSample.CONVERSATION_FIELD_NUMBER


def read_score_request(data: bytes) -> pb.ScoreRequest:
    """Return the message; raises Unfit for one that would take too much memory, and DecodeError."""
    try:
        _check_outline(data)
    except Unfit as error:
        raise Unfit(f"Score: {error}") from error
    return pb.ScoreRequest.FromString(data)


def _check_outline(data: bytes) -> None:
    if len(data) > MAX_MESSAGE_BYTES:
        raise Unfit(f"message of {len(data)} bytes, at most {MAX_MESSAGE_BYTES}; send fewer samples at once")
    samples = turns = 0
    for number, _, begin, end in fields(data, 0, len(data), MAX_REWARD_SAMPLES + 1):
        if number != _SAMPLES:
            continue
        samples += 1
        if samples > MAX_REWARD_SAMPLES:
            raise Unfit(f"samples: more than {MAX_REWARD_SAMPLES}; send fewer at once")
        inside = fields(data, begin, end, MAX_FIELDS)
        turns += sum(1 for inner, *_ in inside if inner == _CONVERSATION)
        if turns > MAX_TURNS:
            raise Unfit(
                f"conversation: more than {MAX_TURNS} messages in one call; send fewer samples at once"
            )


def sample_to_proto(sample: Sample) -> pb.RewardSample:
    message = pb.RewardSample(
        response=sample.response,
        prompt_ids=sample.prompt_ids,
        response_ids=sample.response_ids,
        cut_short=sample.cut_short,
    )
    if isinstance(sample.prompt, str):
        message.prompt = sample.prompt
    else:
        for turn in sample.prompt:
            message.conversation.add(role=turn.role, content=turn.content)
    return message


def sample_from_proto(message: pb.RewardSample) -> Sample:
    """Return a message as a sample; raises ValueError for two prompts, and for one that is too large."""
    if message.prompt and message.conversation:
        raise ValueError("prompt and conversation: give one of the two")
    if message.ByteSize() > MAX_SAMPLE_BYTES:
        raise ValueError(f"{message.ByteSize()} bytes, at most {MAX_SAMPLE_BYTES}")
    prompt: Prompt = message.prompt
    if message.conversation:
        prompt = tuple(Message(turn.role, turn.content) for turn in message.conversation)
    return Sample(
        prompt=prompt,
        response=message.response,
        prompt_ids=tuple(message.prompt_ids),
        response_ids=tuple(message.response_ids),
        cut_short=message.cut_short,
    )


def model_to_proto(by: ScoredBy) -> pb.RewardModel:
    return pb.RewardModel(name=by.name, sha256=by.sha256, mean=by.mean, std=by.std)


def model_from_proto(message: pb.RewardModel) -> ScoredBy:
    return ScoredBy(
        name=message.name,
        sha256=message.sha256,
        mean=message.mean if message.HasField("mean") else None,
        std=message.std if message.HasField("std") else None,
    )


def reply_to_proto(values: Sequence[float | None], by: ScoredBy) -> pb.ScoreReply:
    return pb.ScoreReply(rewards=[pb.Reward(value=value) for value in values], model=model_to_proto(by))


def rewards_from_proto(reply: pb.ScoreReply, expected: int, source: str) -> Rewards:
    """Return the rewards of a reply; raises BadReward when they are fewer or more than expected."""
    if not reply.HasField("model"):
        raise BadReward(
            f"{source}: a reply without its model; does it speak another version of the protocol?"
        )
    values = [reward.value if reward.HasField("value") else None for reward in reply.rewards]
    return Rewards(checked(values, expected, source), model_from_proto(reply.model))
