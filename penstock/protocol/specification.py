"""Run specification: what every process of a run agrees on, written once by the learner."""

from dataclasses import dataclass, fields
from typing import Any, Final

from penstock.protocol import spaces
from penstock.protocol.fragment import MOST
from penstock.protocol.limits import check_id
from penstock.protocol.schema import FragmentSchema
from penstock.protocol.tensor import Array, from_tensor, to_tensor
from penstock.v1 import specification_pb2 as pb


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """Fixed questions: observations and actions by path, each [P, ...]; answer: log_prob float32 [P]."""

    observation: dict[str, Array]
    action: dict[str, Array]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunSpecification:
    """Field meanings in `specification.proto`. The `*_json` sections are canonical JSON text."""

    run: str
    seed: int
    environment_json: str
    policy_json: str
    actor_json: str
    evaluation_json: str
    workload: str
    observation_space: spaces.Space
    action_space: spaces.Space
    schema: FragmentSchema
    probe: Probe
    unroll_length: int
    lock_step: bool
    session_timeout_ms: int
    stale_after: int = 0
    update_steps: int = 0
    max_reward: float = 0.0
    max_log_prob: float = 0.0
    final_masks: bool = False

    def bounds(self) -> dict[str, float]:
        return {"reward": self.max_reward or MOST, "log_prob": self.max_log_prob or MOST}

    def to_proto(self) -> pb.RunSpecification:
        return pb.RunSpecification(
            **{name: getattr(self, name) for name in _SAME},
            hard_staleness=self.stale_after,
            observation_space=spaces.to_proto(self.observation_space),
            action_space=spaces.to_proto(self.action_space),
            schema=self.schema.to_proto(),
            probe=pb.Probe(
                observation={name: to_tensor(array) for name, array in self.probe.observation.items()},
                action={name: to_tensor(array) for name, array in self.probe.action.items()},
            ),
        )

    @classmethod
    def from_proto(cls, message: pb.RunSpecification) -> "RunSpecification":
        """Return the specification of a message; raises ValueError that names the field that is wrong."""
        probe: dict[str, Any] = {
            "observation": {k: from_tensor(f"probe.{k}", t) for k, t in message.probe.observation.items()},
            "action": {k: from_tensor(f"probe.{k}", t) for k, t in message.probe.action.items()},
        }
        check_id("run", message.run)
        check_id("workload", message.workload)
        return cls(
            **{name: getattr(message, name) for name in _SAME},
            stale_after=message.hard_staleness,
            observation_space=spaces.from_proto("observation_space", message.observation_space),
            action_space=spaces.from_proto("action_space", message.action_space),
            schema=FragmentSchema.from_proto(message.schema),
            probe=Probe(**probe),
        )

    def encode(self) -> bytes:
        """Return the bytes that Redis and the checkpoint keep."""
        return self.to_proto().SerializeToString(deterministic=True)

    @classmethod
    def decode(cls, data: bytes) -> "RunSpecification":
        return cls.from_proto(pb.RunSpecification.FromString(data))


_CONVERTED: Final = {"observation_space", "action_space", "schema", "probe", "stale_after"}
_SAME: Final = [one.name for one in fields(RunSpecification) if one.name not in _CONVERTED]
"""Fields that are the same in the message."""
