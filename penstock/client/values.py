"""Arguments and results of the client as frozen dataclasses, with numbers of numpy, or Python's single ones.

`B` is the leading axis of a batch; paths are those of `penstock.protocol.spaces`, "" where there is one part.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any, TypedDict

from penstock.protocol.spaces import Space
from penstock.protocol.tensor import Array


class Arm(IntEnum):
    """The weights that a caller follows; the numbers of `penstock.v1.Arm`."""

    LATEST = 1
    """The learner's newest weights; the only arm that is learned from."""
    ACTIVE = 2
    CANARY = 3
    PINNED = 4


class Fallback(IntEnum):
    """What answered in place of the arm's own version; the numbers of `penstock.v1.Fallback`."""

    PREVIOUS = 1
    """The previous version."""
    FIXED = 2
    """The action that the server's configuration names."""
    UNIFORM = 3
    """An action drawn uniformly."""
    ADAPTER_OFF = 4
    """The language model with its adapter switched off."""


class AnswerOptions(TypedDict, total=False):
    """Options on how an action is chosen and what else the answer contains."""

    deterministic: bool
    """The most likely action instead of a drawn one."""
    seed: int | None
    """From 0 to 2⁶⁴ − 1: equal requests get equal answers."""
    distribution: bool
    """Fill `distribution`."""
    value: bool
    """Fill `value`."""
    mask: Any
    """Allowed choices, one bool each ([n] or [B, n]), or such a mask by the path of each Discrete part."""


class ActOptions(AnswerOptions, total=False):
    """Options of an action without an episode."""

    client_key: str
    """Key of the client: the same key gets the same arm."""
    version: int
    """Exactly this version; 0: that of the client's arm."""
    state: Mapping[str, Array]
    """Recurrent state, `Action.state` of the step before."""


class StepOptions(AnswerOptions, total=False):
    """Options of a step of an episode."""

    reward: float | None
    """Reward of the step before."""
    taken_action: Any
    """The action that the caller takes itself, in the form of the action space."""
    taken_log_prob: float | None
    """Log-probability with which `taken_action` was chosen.

    Without it no on-policy algorithm learns from the step.
    """
    taken_version: int
    """Version that drew `taken_action`; 0: the one that would answer now.

    It must be one of the newest 4,096 that answered `latest` on this server.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Fields that an action and a batch of actions have in common."""

    action: Any
    """In the form of the action space. Writable."""
    distribution: Mapping[str, Array]
    """`probability`, or `mean` and `std`, after the path of each part: "arm/mean".

    Empty unless requested.
    """
    state: Mapping[str, Array]
    """Recurrent state to send with the next request; empty for a policy without one."""
    version: int
    """The weights that answered; 0 for a fallback without any."""
    arm: Arm | None
    fallback: Fallback | None
    """None when the arm's own version answered."""
    request_id: str
    """Id of the request in the server's logs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action(Answer):
    """One action; a Discrete part is an int."""

    log_prob: float | None
    """Joint over the parts; None where the server does not know it, as for some fallbacks."""
    value: float | None
    """Of the observation; None unless requested."""
    episode_id: str
    """"" without an episode."""
    step: int
    """Index of the step in its episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionBatch(Answer):
    """B actions; every array has a leading axis of B."""

    log_prob: Array | None
    """float32 [B]."""
    value: Array | None
    """float32 [B]; None unless requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeResult:
    """The result of an episode that has ended: the sum of its rewards so far, and its steps."""

    total_return: float
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedVersion:
    """A version that can answer, and the arms for which it does."""

    version: int
    update: int
    sha256: str
    arms: tuple[Arm, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """A served policy; fields as in `DescribeReply`."""

    run: str
    policy: str
    observation_space: Space
    action_space: Space
    versions: tuple[ServedVersion, ...]
    """Oldest first."""
    max_batch: int
    max_message_bytes: int
    max_episodes: int
    reward_window_ms: int
    episode_timeout_ms: int
    server: str
    learns: bool
    chooses_by_value: bool = False
    """Whether probabilities describe only how the policy explores, not how sure it is."""


class CommandState(Enum):
    """The progress of a command in the learner."""

    PENDING = "pending"
    DONE = "done"
    REFUSED = "refused"


class CommandRefusal(Enum):
    """Why a command was not done."""

    UNSUPPORTED = "unsupported"
    TOO_FEW_STEPS = "too_few_steps"
    NAME = "name"
    MISMATCH = "mismatch"
    LIMIT = "limit"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandReport:
    """The state of a command.

    refusal: None unless it was refused. detail: the answer in words. version: for a restore, under which the
    weights were published. steps: for a flush, the steps of its batch, or those that were pending.
    """

    state: CommandState
    refusal: CommandRefusal | None
    detail: str
    version: int
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """A run as its broker sees it.

    run: its name; "" before a learner has taken it. version, update: of the newest publication. learner: the
    last report of the learner on itself.
    """

    run: str
    version: int
    update: int
    learner: Mapping[str, Any]
