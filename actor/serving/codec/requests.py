"""Reads requests: from messages, and from bytes where they hold one observation and nothing else.

What a client sends is checked before anything is computed or remembered: what cannot be answered is refused
(INVALID) with the field, what came and what is wanted.
"""

from collections.abc import Mapping
from typing import Final

from penstock.actor.serving.codec.arrays import Layout, Parts
from penstock.actor.serving.codec.plain_request import PlainRequests
from penstock.actor.serving.inference.forward_pass import Question
from penstock.config.settings import ServingSection
from penstock.protocol.refusal import invalid
from penstock.protocol.spaces import Dict, Space, leaves, zeros
from penstock.protocol.tensor import Array
from penstock.v1 import policy_pb2 as pb

MAX_REQUEST_ID: Final = 128
MOST_LOG_PROB: Final = 60.0
"""Whose exponential the learner can divide by in float32."""


class RequestReader:
    """Reads the requests of one server."""

    def __init__(self, section: ServingSection, observation: Space, action: Space, state: Dict) -> None:
        """Prepare for the spaces of one policy.

        state: space of what the policy remembers between steps, without leaves where it remembers nothing.
        """
        self._section = section
        self._observation, self._action = Layout("observation", observation), Layout("action", action)
        self._state, self._state_leaves = Layout("state", state), list(leaves(state, "state"))
        self.remembers = bool(self._state_leaves)
        """Whether the policy has state, so that its answer changes what an episode goes on with."""
        self._plain = PlainRequests(section.policy, observation)

    def check_call(self, policy: str, request_id: str) -> None:
        """Raise Refused unless the policy is served and the id may be remembered."""
        if policy not in ("", self._section.policy):
            raise invalid(f"policy={policy[:80]!r}: here {self._section.policy!r} is served")
        if len(request_id) > MAX_REQUEST_ID:
            check_request_id(request_id)

    def read_plain(self, data: bytes) -> Question | None:
        """Return the question of a plain request's bytes; None for bytes that must be read as a message."""
        return None if self.remembers else self._plain.read(data)

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
            masks=self._action.read_masks(request.action_mask, batch),
            distribution=request.want_distribution,
            value=request.want_value,
            episode_id=request.episode_id,
            request_id=request.request_id,
        )

    def read_final(self, parts: Parts) -> Mapping[str, Array]:
        """Return the last observation of an episode, by name, [1, *shape]; raises Refused (INVALID)."""
        return self._observation.read("final_observation", parts, 0)

    def read_taken(self, request: pb.ActRequest) -> Mapping[str, Array] | None:
        """Return the action that the caller takes of its own accord, by name, [1, *shape].

        None where it asks for one.

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
