"""A run's folder made on the spot, and `penstock serve` over it as a process: no training, no broker."""

import signal
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from torch import nn

from penstock.client import PolicyClient
from penstock.config.settings import ActorSection, PolicySection
from penstock.learner.publish.kept_versions import write_specification
from penstock.policy.policy import Policy, build
from penstock.policy.weights import encode, sha256
from penstock.protocol.schema import fragment_schema
from penstock.protocol.spaces import Box, Discrete
from penstock.protocol.specification import RunSpecification
from penstock.protocol.tensor import Array
from penstock.registry.records import Evaluation, NewVersion, Origin, Status
from penstock.registry.registry import Registry
from penstock.registry.weight_files import path_of, registry_url, write_kept
from tests.support.run import small_run
from tests.support.run.harness import BrokerProcess, eventually
from tests.support.storage.postgresql_server import with_registry

RUN: Final = "served-run"
POLICY: Final = "default"
SERVICE: Final = "penstock.v1.PolicyService"
OBSERVATION: Final = Box(np.full(4, -10, np.float32), np.full(4, 10, np.float32))
ACTION: Final = Discrete(3)
_BY: Final = "test"


@dataclass(frozen=True)
class ServedRun:
    """A folder with a registry; `policies` holds what each version should answer."""

    folder: Path
    policies: dict[int, Policy] = field(default_factory=dict)
    section: PolicySection = field(default_factory=lambda: PolicySection(hidden_sizes=(16, 16)))

    def describe(self) -> None:
        write_specification(self.folder, self.specification())
        with_registry(self.url)

    @property
    def url(self) -> str:
        return registry_url(self.folder)

    def specification(self) -> RunSpecification:
        return replace(
            small_run.specification(RUN),
            policy_json=self.section.canonical_json(),
            actor_json=ActorSection().canonical_json(),
            observation_space=OBSERVATION,
            action_space=ACTION,
            schema=fragment_schema(OBSERVATION, ACTION),
        )

    def build(self, seed: int) -> Policy:
        policy = build(OBSERVATION, ACTION, self.section, seed)
        generator = torch.Generator().manual_seed(seed)
        nn.init.normal_(policy.actor_head.weight, std=0.5, generator=generator)
        return policy

    def register(self, version: int, policy: Policy | None = None) -> None:
        """Keep a version: its file, then its row, as a learner does."""
        made = self.policies[version] = policy or self.build(version)
        self.keep(version, encode(made))

    def keep(self, version: int, blob: bytes) -> None:
        write_kept(self.folder, version, blob)
        new = NewVersion(
            policy=POLICY,
            version=version,
            run=RUN,
            update=version,
            sha256=sha256(blob),
            size_bytes=len(blob),
            origin=Origin.PERIODIC,
            evaluation=Evaluation(mean=0.5, std=0.1, episodes=10),
        )
        with Registry.open(self.url) as registry:
            registry.register(new, by=_BY, make_room=True)

    def next_version(self, policy: Policy | None = None) -> int:
        """A new version, kept; its number."""
        version = max(self.policies, default=0) + 1
        self.register(version, policy)
        return version

    def promote(self, version: int, canary_share: float | None = None) -> None:
        to = Status.ACTIVE if canary_share is None else Status.CANARY
        with Registry.open(self.url) as registry:
            registry.promote(POLICY, version, "a test", by=_BY, to=to, canary_share=canary_share)

    def withdraw_canary(self) -> None:
        with Registry.open(self.url) as registry:
            registry.rollback(POLICY, "a test", by=_BY)

    def status(self, version: int) -> Status:
        with Registry.open(self.url) as registry:
            return registry.get(POLICY, version).status

    def damage(self, version: int) -> None:
        path = path_of(self.folder, version)
        blob = bytearray(path.read_bytes())
        blob[-1] ^= 0xFF
        path.write_bytes(blob)

    def offline(self, version: int, observation: Array) -> Any:
        policy = self.policies[version]
        with torch.inference_mode():
            inputs = policy.read({"observation": torch.from_numpy(np.array(observation))})
            return policy.outputs(inputs).parameters.softmax(-1).numpy()


def begun(folder: Path, **policy: Any) -> ServedRun:
    made = ServedRun(folder, section=PolicySection(**({"hidden_sizes": (16, 16)} | policy)))
    made.describe()
    made.promote(made.next_version())
    return made


def follow(run: ServedRun, client: PolicyClient, version: int) -> None:
    run.promote(version)
    eventually(lambda: client.act(np.zeros(4, np.float32)).version == version, f"version {version}", 60)


def health_of(address: str) -> int:
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return int(stub.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=20).status)


def terminate(server: BrokerProcess) -> None:
    server.process.send_signal(signal.SIGTERM)
