"""Calls of PolicyService as data: the request, and how its reply is read; no connection, no event loop.

A call that changes something carries a random `request_id`, made once, so that a repetition carries it, too.
"""

import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Final, Generic, TypeVar, cast

import numpy as np

from penstock.client.errors import BadReply, from_refusal
from penstock.client.values import (
    Action,
    ActionBatch,
    ActOptions,
    AnswerOptions,
    Arm,
    Description,
    EpisodeResult,
    Fallback,
    ServedVersion,
    StepOptions,
)
from penstock.protocol.refusal import Refusal
from penstock.protocol.schema import choices
from penstock.protocol.spaces import (
    Discrete,
    Leaf,
    MultiBinary,
    Space,
    flatten,
    from_proto,
    leaves,
    unflatten,
)
from penstock.protocol.tensor import Array, from_tensor, to_tensor
from penstock.v1 import policy_pb2 as pb

# ---- Convert observations and actions to parts of a message, and back.

_INTEGERS: Final = "biu"
"""Kinds of the dtypes that hold whole numbers."""


def rows_of(field: str, space: Space, value: Any) -> int:
    """Return the number B of rows of a batch of `space`; raises ValueError where there is no such axis."""
    for path, part in _flat(field, space, value).items():
        array = _array(path, part)
        if not array.ndim or not len(array):
            raise ValueError(f"{path}: a batch needs a leading axis with at least one row, not {array.shape}")
        return len(array)
    raise ValueError(f"{field}: a space without parts has no batches")


def to_parts(field: str, space: Space, value: Any, rows: int = 0) -> list[pb.Part]:
    """Return a part for every leaf of a value; raises ValueError for a value that is not of the space.

    field: name of the value, for messages. rows: length of the leading axis of each leaf, 0 for none.
    """
    flat = _flat(field, space, value)
    return [
        pb.Part(path=path, value=to_tensor(_cast(name, leaf, part, rows)))
        for (path, leaf), (name, part) in zip(leaves(space), flat.items(), strict=True)
    ]


def to_mask_parts(space: Space, mask: Any, rows: int = 0) -> list[pb.Part]:
    """Return the parts of an action mask: which choices are allowed.

    mask: one mask for a bare space of choices, or masks by path. Raises ValueError for any other.
    """
    masks: Mapping[str, Any] = mask if isinstance(mask, Mapping) else {"": mask}
    wanted = {path: MultiBinary(choices(leaf), "bool") for path, leaf in leaves(space) if choices(leaf)}
    if not masks.keys() <= wanted.keys():
        raise ValueError(
            f"mask: {sorted(masks.keys() - wanted.keys())} are no choices of the action space; "
            f"those are {sorted(wanted)}"
        )
    return [
        pb.Part(path=path, value=to_tensor(_cast(_join("mask", path), wanted[path], part, rows)))
        for path, part in masks.items()
    ]


def to_plain_parts(values: Mapping[str, Array]) -> list[pb.Part]:
    """Return a part for each array, by path, in the array's own dtype and shape."""
    return [pb.Part(path=path, value=to_tensor(np.asarray(value))) for path, value in values.items()]


def from_parts(field: str, space: Space, parts: Iterable[pb.Part], rows: int = 0) -> Any:
    """Return a value in the form of `space`, writable; a Discrete leaf without rows is an int.

    Raises ValueError when a part is missing, foreign or of another shape.
    """
    arrays = from_plain_parts(field, parts)
    expected = dict(leaves(space))
    if arrays.keys() != expected.keys():
        raise ValueError(f"{field}: the parts are {sorted(arrays)}, not {sorted(expected)}")
    values = {path: _native(_join(field, path), leaf, arrays[path], rows) for path, leaf in expected.items()}
    return unflatten(space, values)


def from_plain_parts(field: str, parts: Iterable[pb.Part]) -> dict[str, Array]:
    """Return arrays by path, writable."""
    return {part.path: from_tensor(_join(field, part.path), part.value).copy() for part in parts}


def _flat(field: str, space: Space, value: Any) -> dict[str, Any]:
    try:
        return flatten(space, value, field)
    except (LookupError, TypeError) as error:
        paths = ", ".join(path for path, _ in leaves(space, field))
        raise ValueError(f"{field}: {error!r}; the space has {paths}") from error


def _array(name: str, value: Any) -> Array:
    try:
        return np.asarray(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _cast(name: str, leaf: Leaf, value: Any, rows: int) -> Array:
    array, dtype = _array(name, value), np.dtype(leaf.dtype)
    shape = (rows, *leaf.shape) if rows else leaf.shape
    if array.shape != shape:
        raise ValueError(f"{name}: the shape is {array.shape}, the space asks for {shape}")
    if not _is_safe(array, dtype):
        raise ValueError(f"{name}: {array.dtype} cannot become {dtype} without loss; convert it first")
    return array.astype(dtype, copy=False)


def _is_safe(array: Array, dtype: np.dtype[Any]) -> bool:
    if array.dtype.kind in _INTEGERS and dtype.kind in _INTEGERS:
        return array.dtype == dtype or bool(np.array_equal(array.astype(dtype), array))
    return np.can_cast(array.dtype, dtype, "same_kind")


def _native(name: str, leaf: Leaf, array: Array, rows: int) -> Any:
    shape = (rows, *leaf.shape) if rows else leaf.shape
    if array.shape != shape:
        raise ValueError(f"{name}: the shape is {array.shape}, the space asks for {shape}")
    return array.item() if isinstance(leaf, Discrete) and not rows else array


def _join(field: str, path: str) -> str:
    return f"{field}/{path}" if path else field


T = TypeVar("T")
_SHOWN: Final = 80
"""Characters of a value that a message repeats."""


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A request to one method of the service. share: largest share of the deadline for one attempt."""

    method: str
    request: Any
    read: Callable[[Any], T]
    share: float = 0.5

    def result(self, reply: Any) -> T:
        """Return the content; raises the PolicyError of its refusal, BadReply when it cannot be read."""
        try:
            refusal = Refusal.from_proto(reply.refusal) if hasattr(reply, "refusal") else None
            if refusal is None:
                return self.read(reply)
        except ValueError as error:
            raise BadReply(
                f"a reply of the policy server cannot be read: {error}; use the same version everywhere"
            ) from error
        raise from_refusal(refusal)


@dataclass(frozen=True, slots=True)
class Started:
    """An episode or a conversation that has begun."""

    id: str
    arm: Arm | None
    learned: bool


def checked_text(field: str, value: str) -> str:
    """Return a text that a message can hold; raises ValueError for one with half of a pair of surrogates."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{field}={value[:_SHOWN]!r}: character {error.start} is half of a pair of surrogates; "
            "decode the text by its own encoding"
        ) from error
    return value


def describe(policy: str) -> Call[Description]:
    return Call("Describe", pb.DescribeRequest(policy=policy), _description)


def start(policy: str, client_key: str, learned: bool) -> Call[Started]:
    request = pb.StartEpisodeRequest(
        policy=policy,
        request_id=new_request_id(),
        client_key=checked_text("client_key", client_key),
        not_learned=not learned,
    )
    return Call(
        "StartEpisode", request, lambda reply: Started(reply.episode_id, arm_of(reply.arm), reply.learned)
    )


def abandon(episode_id: str) -> Call[EpisodeResult]:
    """Return the call EndEpisode for an episode whose last step has no known outcome."""
    request = pb.EndEpisodeRequest(
        episode_id=episode_id, request_id=new_request_id(), ending=pb.ENDING_ABANDONED
    )
    return Call("EndEpisode", request, partial(copied, EpisodeResult))


def reward(episode_id: str, rewards: Iterable[tuple[int | None, float]], request_id: str = "") -> Call[int]:
    """Return the call Reward, whose result is the number of rewards that arrived too late.

    rewards: (index of the step, amount); index None: the newest step. request_id: the caller's; "": a new
    one.
    """
    steps = [pb.StepReward(step=step, amount=amount) for step, amount in rewards]
    request = pb.RewardRequest(
        episode_id=checked_text("episode_id", episode_id),
        request_id=checked_text("request_id", request_id) or new_request_id(),
        rewards=steps,
    )
    return Call("Reward", request, lambda reply: int(reply.late))


class Codec:
    """Makes the calls that carry observations and actions of one policy."""

    def __init__(self, policy: str, description: Description) -> None:
        self._policy = policy
        self._observation_space, self._action_space = description.observation_space, description.action_space

    def act(self, observation: Any, options: ActOptions) -> Call[Action]:
        """Return the call Act for one observation."""
        request = self._request(observation, options, 0)
        self._add_caller(request, options)
        return Call("Act", request, self._action)

    def act_batch(self, observations: Any, options: ActOptions) -> Call[ActionBatch]:
        """Return the call Act for B observations on a leading axis."""
        rows = rows_of("observation", self._observation_space, observations)
        request = self._request(observations, options, rows)
        self._add_caller(request, options)
        return Call("Act", request, lambda reply: self._actions(reply, rows))

    def step(self, episode_id: str, step: int, observation: Any, options: StepOptions) -> Call[Action]:
        """Return the call Act for that step of an episode."""
        request = self._request(observation, options, 0)
        request.episode_id, request.step = episode_id, step
        if (earned := options.get("reward")) is not None:
            request.reward = earned
        if (taken := options.get("taken_action")) is not None:
            request.taken_action.extend(to_parts("taken_action", self._action_space, taken))
        if (log_prob := options.get("taken_log_prob")) is not None:
            request.taken_log_prob = log_prob
        request.taken_version = options.get("taken_version", 0)
        return Call("Act", request, self._action)

    def end(
        self, episode_id: str, terminated: bool, truncated: bool, final_observation: Any, reward: float | None
    ) -> Call[EpisodeResult]:
        """Return the call EndEpisode; an episode that is both terminated and truncated is terminated."""
        if not (terminated or truncated):
            raise ValueError("say terminated=True or truncated=True, or abandon the episode")
        if not terminated and final_observation is None:
            raise ValueError(
                "truncated=True: the value of the last observation counts; give final_observation"
            )
        request = pb.EndEpisodeRequest(
            episode_id=episode_id,
            request_id=new_request_id(),
            ending=pb.ENDING_TERMINATED if terminated else pb.ENDING_TRUNCATED,
            reward=reward,
        )
        if final_observation is not None:
            request.final_observation.extend(
                to_parts("final_observation", self._observation_space, final_observation)
            )
        return Call("EndEpisode", request, partial(copied, EpisodeResult))

    def _request(self, observation: Any, options: AnswerOptions, rows: int) -> pb.ActRequest:
        mask = options.get("mask")
        return pb.ActRequest(
            policy=self._policy,
            request_id=new_request_id(),
            observation=to_parts("observation", self._observation_space, observation, rows),
            batch=rows,
            action_mask=[] if mask is None else to_mask_parts(self._action_space, mask, rows),
            deterministic=options.get("deterministic", False),
            seed=options.get("seed"),
            want_distribution=options.get("distribution", False),
            want_value=options.get("value", False),
        )

    def _add_caller(self, request: pb.ActRequest, options: ActOptions) -> None:
        request.client_key = checked_text("client_key", options.get("client_key", ""))
        request.version = options.get("version", 0)
        state = options.get("state", {})
        request.state.extend(to_plain_parts({checked_text("state", path): state[path] for path in state}))

    def _action(self, reply: pb.ActReply) -> Action:
        return Action(
            **self._answer(reply, 0),
            log_prob=reply.log_prob[0] if reply.log_prob else None,
            value=reply.value[0] if reply.value else None,
            episode_id=reply.episode_id,
            step=reply.step,
        )

    def _actions(self, reply: pb.ActReply, rows: int) -> ActionBatch:
        return ActionBatch(
            **self._answer(reply, rows),
            log_prob=np.array(reply.log_prob, np.float32) if reply.log_prob else None,
            value=np.array(reply.value, np.float32) if reply.value else None,
        )

    def _answer(self, reply: pb.ActReply, rows: int) -> dict[str, Any]:
        return {
            "action": from_parts("action", self._action_space, reply.action, rows),
            "distribution": from_plain_parts("distribution", reply.distribution),
            "state": from_plain_parts("state", reply.state),
            "version": reply.version,
            "arm": arm_of(reply.arm),
            "fallback": Fallback(reply.fallback) if reply.fallback else None,
            "request_id": reply.request_id,
        }


def new_request_id() -> str:
    """Return a new random id."""
    return secrets.token_hex(16)


def arm_of(number: int) -> Arm | None:
    return Arm(number) if number else None


def copied(kind: type[T], message: Any, **others: Any) -> T:
    """Return a dataclass with the fields of a message of the same names. others: fields to take instead."""
    names = {one.name for one in fields(cast(Any, kind))} - others.keys()
    return kind(**{name: getattr(message, name) for name in names}, **others)


def versions_of(messages: Iterable[pb.ServedVersion]) -> tuple[ServedVersion, ...]:
    return tuple(copied(ServedVersion, one, arms=tuple(Arm(arm) for arm in one.arms)) for one in messages)


def _description(reply: pb.DescribeReply) -> Description:
    return copied(
        Description,
        reply,
        observation_space=from_proto("observation_space", reply.observation_space),
        action_space=from_proto("action_space", reply.action_space),
        versions=versions_of(reply.versions),
    )
