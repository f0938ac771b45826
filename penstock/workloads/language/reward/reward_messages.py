"""Samples and rewards on the wire, and what a request may unfold to."""

from collections.abc import Sequence
from typing import Final

from penstock.protocol.limits import MAX_MESSAGE_BYTES, MIB
from penstock.protocol.rawproto import Unfit, fields
from penstock.v1 import reward_pb2 as pb
from penstock.workloads.language.prompt import Message, Prompt
from penstock.workloads.language.reward.reward_source import BadReward, Rewards, Sample, ScoredBy, checked

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
    """Return the message of these bytes.

    Raises Unfit for what is too large or would unfold to too much, DecodeError for bytes that are no such
    message.
    """
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
    """Return the message."""
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
    """The sample of a message; raises ValueError for one with two prompts, or text above MAX_SAMPLE_BYTES."""
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
    """Return the message; what was not measured stays absent."""
    return pb.RewardModel(name=by.name, sha256=by.sha256, mean=by.mean, std=by.std)


def model_from_proto(message: pb.RewardModel) -> ScoredBy:
    """Return whose rewards a message says they are."""
    return ScoredBy(
        name=message.name,
        sha256=message.sha256,
        mean=message.mean if message.HasField("mean") else None,
        std=message.std if message.HasField("std") else None,
    )


def reply_to_proto(values: Sequence[float | None], by: ScoredBy) -> pb.ScoreReply:
    """The message; a reward that is None stays absent."""
    return pb.ScoreReply(rewards=[pb.Reward(value=value) for value in values], model=model_to_proto(by))


def rewards_from_proto(reply: pb.ScoreReply, expected: int, whose: str) -> Rewards:
    """Return the rewards of a reply.

    Raises BadReward when they are not as many as were asked for, or none at all.
    """
    if not reply.HasField("model"):
        raise BadReward(f"{whose}: a reply without its model; does it speak another version of the protocol?")
    values = [reward.value if reward.HasField("value") else None for reward in reply.rewards]
    return Rewards(checked(values, expected, whose), model_from_proto(reply.model))
