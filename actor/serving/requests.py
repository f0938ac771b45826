"""Between messages of the protocol and arrays: reads requests, writes replies.

What a client sends is checked before anything is computed or remembered: what cannot be answered is refused
(INVALID) with the field, what came and what is wanted.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from penstock.actor.serving.batcher import Answered, Loaded, Question
from penstock.actor.serving.episodes import Episode
from penstock.actor.serving.fallback import FALLBACKS
from penstock.config.settings import ServingSection
from penstock.protocol.refusal import Refused, invalid
from penstock.protocol.schema import Range, choices, drawn, observed
from penstock.protocol.spaces import Box, Dict, Leaf, MultiDiscrete, Space, leaves, zeros
from penstock.protocol.tensor import DTYPES, Array, from_tensor
from penstock.registry.routing import Arm
from penstock.v1 import policy_pb2 as pb
from penstock.v1 import tensor_pb2

# ---- Observations, actions and distributions between messages and arrays, checked leaf by leaf.

Parts = Sequence[pb.Part]


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One leaf. path: as clients write it.   name: of the tensor, "observation/camera".

    range: what a learner would take; None where the dtype holds no other number.
    """

    path: str
    name: str
    leaf: Leaf
    dtype: str
    numpy_dtype: "np.dtype[np.generic]"
    shape: tuple[int, ...]
    listed: list[int]
    row_bytes: int
    range: Range | None


class Layout:
    """The leaves of a space under `root`, "observation" or "action"."""

    def __init__(self, root: str, space: Space) -> None:
        self.root = root
        wanted = (_wanted(root, name, leaf) for name, leaf in leaves(space, root))
        self._wanted = {one.path: one for one in wanted}
        self._masks = {
            path: choices(wanted.leaf) for path, wanted in self._wanted.items() if choices(wanted.leaf)
        }

    def read(self, field: str, parts: Parts, batch: int) -> dict[str, Array]:
        """Return arrays [max(batch, 1), *shape] by tensor name; raises Refused for anything else."""
        count = len(parts)
        if count != len(self._wanted):
            raise invalid(f"{field}: {count} parts, the space has {self._named()}")
        arrays: dict[str, Array] = {}
        for index in range(count):  # to iterate over a field of messages costs three times as much
            part = parts[index]
            wanted = self._wanted.get(part.path)
            if wanted is None or wanted.name in arrays:
                raise invalid(f"{field}: part {part.path[:80]!r} is unknown or twice; give {self._named()}")
            arrays[wanted.name] = _read(field, part.value, wanted, batch)
        return arrays

    def read_masks(self, parts: Parts, batch: int) -> dict[str, NDArray[np.bool_]]:
        """Bool [max(batch, 1), n] by tensor name, true where allowed."""
        masks: dict[str, NDArray[np.bool_]] = {}
        for part in parts:
            if part.path not in self._masks:
                known = ", ".join(map(repr, self._masks)) or "none"
                raise invalid(f"action_mask: no mask for {part.path[:80]!r}; leaves that take one: {known}")
            shape = _lead(batch, (self._masks[part.path],))
            mask = _array(f"action_mask/{part.path}", part.value, "bool", shape)
            rows: NDArray[Any] = mask.reshape(-1, shape[-1])
            if not all(piece.any(-1).all() for piece in self._choices_of(part.path, rows)):
                raise invalid(f"action_mask/{part.path}: allows nothing; allow at least one action")
            masks[self._wanted[part.path].name] = rows
        return masks

    def _choices_of(self, path: str, rows: NDArray[Any]) -> list[NDArray[Any]]:
        leaf = self._wanted[path].leaf
        return np.split(rows, np.cumsum(leaf.nvec)[:-1], -1) if isinstance(leaf, MultiDiscrete) else [rows]

    def write(self, arrays: Mapping[str, Array], batch: int) -> list[pb.Part]:
        """The parts of arrays [max(batch, 1), *shape] by tensor name."""
        return [
            _part(wanted.path, arrays[wanted.name], wanted.dtype, batch) for wanted in self._wanted.values()
        ]

    def write_described(self, described: Mapping[str, NDArray[np.floating]], batch: int) -> list[pb.Part]:
        """The parts of a distribution [max(batch, 1), size] by name, "action/probability"."""
        return [
            _part(name.removeprefix(self.root).removeprefix("/"), array.astype(np.float32), "float32", batch)
            for name, array in described.items()
        ]

    def _named(self) -> str:
        return ", ".join(map(repr, self._wanted))


def _wanted(root: str, name: str, leaf: Leaf) -> _Wanted:
    path, dtype, shape = name.removeprefix(root).removeprefix("/"), DTYPES[leaf.dtype], leaf.shape
    # Choices come as the environment takes them, real numbers as they were drawn.
    known = drawn(leaf) if root == "action" and isinstance(leaf, Box) else observed(leaf)
    row_bytes = math.prod(shape) * dtype.itemsize
    return _Wanted(path, name, leaf, leaf.dtype, dtype, shape, [*shape], row_bytes, known)


def _lead(batch: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (batch, *shape) if batch else shape


def _array(field: str, message: tensor_pb2.Tensor, dtype: str, shape: tuple[int, ...]) -> Array:
    try:
        array = from_tensor(field, message)
    except ValueError as error:
        raise invalid(str(error)) from error
    if message.dtype != dtype or array.shape != shape:
        raise invalid(f"{field}: {message.dtype}{array.shape} came, {dtype}{shape} is wanted")
    return array


def _read(field: str, message: tensor_pb2.Tensor, wanted: _Wanted, batch: int) -> Array:
    """Read rows [max(batch, 1), *shape]; a usual part costs one check, since every request passes here."""
    data, shape = message.data, [batch, *wanted.shape] if batch else wanted.listed
    is_alike = message.dtype == wanted.dtype and message.shape == shape
    if is_alike and wanted.dtype != "bool" and len(data) == wanted.row_bytes * (batch or 1) > 0:
        rows: Array = np.ndarray((batch or 1, *wanted.shape), wanted.numpy_dtype, data)
    else:
        array = _array(f"{field}/{wanted.path}", message, wanted.dtype, _lead(batch, wanted.shape))
        rows = array if batch else array[np.newaxis]
    if wanted.range is not None and not wanted.range.holds(rows):
        raise _outside(f"{field}/{wanted.path}", rows, wanted.range)
    return rows


def _outside(field: str, rows: Array, known: Range) -> Refused:
    place = known.first_outside(rows)
    value: Any = rows[place]
    if not math.isfinite(value):
        return invalid(f"{field}: holds NaN or infinity; send finite numbers")
    return invalid(
        f"{field}: holds {value:g}, outside {known.around(rows, place)}; send what the space holds"
    )


def _part(path: str, array: Array, dtype: str, batch: int) -> pb.Part:
    rows = array if batch else array[0]
    tensor = tensor_pb2.Tensor(dtype=dtype, shape=rows.shape, data=rows.tobytes())
    return pb.Part(path=path, value=tensor)


# ---- Writes replies: as messages, and as bytes put together from pieces that protobuf wrote before.

ARMS: Final = {arm: pb.Arm.Value(f"ARM_{arm.name}") for arm in Arm}


def served_versions(served: Mapping[int, tuple[Loaded, Sequence[Arm]]]) -> list[pb.ServedVersion]:
    """Return what `Describe` says of versions and their arms. served: see `LoadedVersions.served`."""
    return [
        pb.ServedVersion(
            version=version, update=loaded.update, sha256=loaded.sha256, arms=[ARMS[arm] for arm in arms]
        )
        for version, (loaded, arms) in served.items()
    ]


_FALLBACKS: Final = {
    name: pb.Fallback.Value(f"FALLBACK_{name.upper() or 'UNSPECIFIED'}") for name in FALLBACKS
}


class ReplyWriter:
    """Writes the replies of one server. state: space of what the policy remembers, if anything."""

    def __init__(self, action: Space, state: Dict) -> None:
        self._action, self._leaves = Layout("action", action), list(leaves(action, "action"))
        self._state, self._remembers = Layout("state", state), bool(list(leaves(state, "state")))
        self._before: dict[int, tuple[list[tuple[str, bytes]], bytes]] = {}
        """By batch: what stands before each leaf of the action, by name, and before the log-probabilities."""

    def encode(self, request: pb.ActRequest, answered: Answered) -> bytes:
        """Return the bytes of `reply`."""
        answer = answered.answer
        if answer is None or answer.distribution is not None or answer.value is not None or self._remembers:
            return self.reply(request, answered).SerializeToString()
        request_id, batch, action = request.request_id, request.batch, answered.action
        before_action, before_log_prob = self._before.get(batch) or self._prepare(batch)
        pieces = [pb.ActReply(request_id=request_id).SerializeToString()] if request_id else []
        for name, piece in before_action:
            pieces += (piece, action[name].tobytes())
        who = _answered_by(answer.loaded.version, answered.arm, answered.fallback)
        pieces += (before_log_prob, answer.log_prob.tobytes(), who)
        return b"".join(pieces)

    def reply(self, request: pb.ActRequest, answered: Answered) -> pb.ActReply:
        answer, batch = answered.answer, request.batch
        reply = pb.ActReply(
            request_id=request.request_id,
            action=self._action.write(answered.action, batch),
            version=0 if answer is None else answer.loaded.version,
            arm=ARMS[answered.arm],
            fallback=_FALLBACKS[answered.fallback],
        )
        if answer is not None:
            reply.log_prob.extend(answer.log_prob.tolist())
            if answer.distribution is not None:
                reply.distribution.extend(self._action.write_described(answer.distribution, batch))
            if answer.value is not None:
                reply.value.extend(answer.value.tolist())
        if self._remembers and not request.episode_id:
            # Where no policy answered the state is unchanged: the caller keeps its own.
            kept: Parts = request.state if answer is None else self._state.write(answer.state, batch)
            reply.state.extend(kept)
        return reply

    def reply_taken(
        self, request: pb.ActRequest, answered: Answered, taken: Mapping[str, Array], version: int
    ) -> pb.ActReply:
        """Return the reply to a caller that chose the action [1, *shape] itself. version: that was served."""
        reply = self.reply(request, answered)
        del reply.action[:], reply.log_prob[:]
        reply.action.extend(self._action.write(taken, 0))
        if request.HasField("taken_log_prob"):
            reply.log_prob.append(request.taken_log_prob)
        reply.version = version
        return reply

    def _prepare(self, batch: int) -> tuple[list[tuple[str, bytes]], bytes]:
        rows = batch or 1
        nothing = {name: zeros(leaf, (rows,)) for name, leaf in self._leaves}
        parts = zip(nothing, self._action.write(nothing, batch), strict=True)
        before_action = [(name, _before(pb.ActReply(action=[part]), part.value.data)) for name, part in parts]
        before_log_prob = _before(pb.ActReply(log_prob=[0.0] * rows), bytes(4 * rows))
        self._before[batch] = before_action, before_log_prob
        return self._before[batch]


@lru_cache(maxsize=64)
def _answered_by(version: int, arm: Arm, fallback: str) -> bytes:
    """Return the last piece of a reply: version, arm and fallback."""
    return pb.ActReply(version=version, arm=ARMS[arm], fallback=_FALLBACKS[fallback]).SerializeToString()


def _before(message: Message, last: bytes) -> bytes:
    """The bytes of a message before its last ones, which must be `last`."""
    written = message.SerializeToString()
    assert written.endswith(last)
    return written.removesuffix(last)


MAX_REQUEST_ID: Final = 128
MOST_LOG_PROB: Final = 60.0
"""Whose exponential the learner can divide by in float32."""


class RequestReader:
    """Reads the requests of one server. state: as that of `ReplyWriter`."""

    def __init__(self, section: ServingSection, observation: Space, action: Space, state: Dict) -> None:
        self._section = section
        self._observation, self._action = Layout("observation", observation), Layout("action", action)
        self._state, self._state_leaves = Layout("state", state), list(leaves(state, "state"))
        self.remembers = bool(self._state_leaves)
        """Whether the policy has recurrent state, which each of its answers changes."""

    def check_call(self, policy: str, request_id: str) -> None:
        """Raise Refused unless the policy is served and the id may be remembered."""
        if policy not in ("", self._section.policy):
            raise invalid(f"policy={policy[:80]!r}: here {self._section.policy!r} is served")
        check_request_id(request_id)

    def read(self, request: pb.ActRequest) -> Question:
        """Return the question of a request; raises Refused (INVALID) for one that cannot be answered."""
        self.check_call(request.policy, request.request_id)
        batch = request.batch
        if batch > self._section.max_request_rows:
            raise invalid(f"batch={batch}: at most {self._section.max_request_rows} rows in one request")
        observation = self._observation.read("observation", request.observation, batch)
        if self.remembers or request.state:
            observation |= self._read_state(request)
        return Question(
            observation=observation,
            rows=batch or 1,
            deterministic=request.deterministic,
            seed=request.seed if request.HasField("seed") else None,
            masks=self._action.read_masks(request.action_mask, batch) if request.action_mask else None,
            distribution=request.want_distribution,
            value=request.want_value,
            episode_id=request.episode_id,
            request_id=request.request_id,
        )

    def read_final(self, parts: Parts) -> Mapping[str, Array]:
        """Return the last observation of an episode, by name, [1, *shape]; raises Refused (INVALID)."""
        return self._observation.read("final_observation", parts, 0)

    def read_taken(self, request: pb.ActRequest) -> Mapping[str, Array] | None:
        """Return the action that the caller chose itself, by name, [1, *shape]; None: it asks for one.

        Raises Refused (INVALID), also for a log-probability that the learner could not divide by.
        """
        if not request.taken_action:
            return None
        if request.HasField("taken_log_prob") and not abs(request.taken_log_prob) <= MOST_LOG_PROB:
            text = f"taken_log_prob={request.taken_log_prob}: must be finite, and within ±{MOST_LOG_PROB:g}"
            raise invalid(f"{text}: so small a probability overflows in the update")
        return self._action.read("taken_action", request.taken_action, 0)

    def _read_state(self, request: pb.ActRequest) -> dict[str, Array]:
        """The state that the caller has kept; without one an episode begins."""
        if request.state and not self.remembers:
            raise invalid("state: this policy has no recurrent state; leave it out")
        if request.state and request.episode_id:
            raise invalid("state: the episode keeps it here; leave it out")
        if request.state:
            return self._state.read("state", request.state, request.batch)
        return {name: zeros(leaf, (request.batch or 1,)) for name, leaf in self._state_leaves}


def check_request_id(request_id: str) -> None:
    """Raise Refused (INVALID) unless the id may be remembered."""
    if len(request_id) > MAX_REQUEST_ID:
        raise invalid(f"request_id of {len(request_id)} characters: at most {MAX_REQUEST_ID}")


# ---- Rewards in requests.

MAX_REWARDS: Final = 1024
"""In one call."""
_LARGEST: Final = float(np.finfo(np.float32).max)


def reward_of_step_before(episode: Episode, request: Any) -> float | None:
    """The reward of the step before that an Act or EndEpisode carries; raises Refused."""
    if not request.HasField("reward"):
        return None
    if episode.segment_builder.length == 0:
        raise invalid(f"reward={request.reward}: there was no step before")
    return check_amount(request.reward)


def check_count(count: int) -> None:
    """Raise Refused (INVALID) unless so many rewards may come in one call."""
    if not 1 <= count <= MAX_REWARDS:
        raise invalid(f"rewards: {count} in one call, send 1 to {MAX_REWARDS}")


def check_amount(amount: float) -> float:
    """Return the amount; raises Refused (INVALID) where it is not finite as a 32-bit number."""
    if not abs(amount) <= _LARGEST:
        raise invalid(f"reward={amount}: must be finite as a 32-bit number")
    return amount
