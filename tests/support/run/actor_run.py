"""Real actors in a run: the learner's side that a test steps by hand, actors in threads."""

import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

import numpy as np

from penstock.actor import process
from penstock.broker.log.learner_log import LearnerLog
from penstock.broker.log.replies import Pacing
from penstock.config import settings as configuration
from penstock.config.workload import find, load
from penstock.policy.policy import Policy
from penstock.policy.weights import encode
from penstock.protocol.fragment import Fragment, check
from penstock.protocol.messages import Episode, Publication, Report, Role
from penstock.protocol.schema import fragment_schema
from penstock.protocol.specification import Probe, RunSpecification
from penstock.runtime.lifecycle import Lifecycle
from tests.support.run import small_run
from tests.support.run.small_run import RUN

UNROLL: Final = 4
PATIENCE_S: Final = 20.0
PROGRAM: Final = """
import sys
from penstock.actor.process import main
from penstock.runtime.lifecycle import run_service
from penstock.config.settings import load
from penstock.protocol.messages import Role
address, actor_id = sys.argv[1:]
sys.exit(run_service(
    lambda lifecycle: main(
        lifecycle, broker=address, actor_id=actor_id, role=Role.ROLLOUT, settings=load([])
    ),
    "actor",
))
"""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a test varies. Steps; `budget_fragments` in full fragments."""

    workload: str = "control"
    unroll: int = UNROLL
    environment: Mapping[str, Any] = field(default_factory=lambda: {"count": 2})
    policy: Mapping[str, Any] = field(default_factory=lambda: {"hidden_sizes": [8]})
    actor: Mapping[str, Any] = field(default_factory=dict)
    evaluation: Mapping[str, Any] = field(default_factory=lambda: {"episodes": 5})
    budget_fragments: int = 8
    actor_count: int = 1
    lock_step: bool = False
    session_timeout_ms: int = 30_000
    max_log_bytes: int = 2**28


class ScriptedLearner:
    """The learner's side of a run, one call at a time. Every publication has weights of its own."""

    def __init__(self, redis_url: str, plan: Plan) -> None:
        layer = {name: dict(getattr(plan, name)) for name in ("environment", "policy", "actor", "evaluation")}
        self.settings = configuration.load([layer])
        self.workload = find(plan.workload)
        self.observation, self.action = load(self.workload.spaces)(self.settings.environment)
        self.schema = fragment_schema(self.observation, self.action)
        self.probe = self._make_probe()
        self.specification = self._specify(plan)
        self.log = LearnerLog.connect(redis_url, wait_s=PATIENCE_S)
        self.log.acquire(RUN, "learner", 15_000)
        self.charge = plan.unroll * self.settings.environment.count
        self.log.start(self.specification.encode(), self._pace(plan))
        self.policies: dict[int, Policy] = {}
        self.fragments: list[Fragment] = []
        self.rounds: list[int] = []
        self.reports: list[Report] = []
        self.position = self._reported = 0

    def build(self, seed: int) -> Policy:
        policy: Policy = load(self.workload.policy)(self.observation, self.action, self.settings.policy, seed)
        return policy

    def publish(self, *, opens: int | None = None, pin: bool = False) -> Publication:
        update = len(self.policies)
        policy = self.build(update)
        made = self.log.publish(
            encode(policy), update=update, settled=self.position, scalars={}, round=opens, pin=pin
        )
        self.policies[made.version] = policy
        return made

    def read(self) -> int:
        """Take in what came; returns the number of fragments so far."""
        for entry in self.log.read(self.position, 1000, 20):
            (payload,) = self.log.fetch([entry.number])
            assert entry.header is not None
            assert payload is not None
            fragment = Fragment(entry.header, payload)
            check(fragment, self.schema, RUN)
            self.fragments.append(fragment)
            self.rounds.append(entry.round)
            self.position = entry.number
        for entry_ in self.log.read_reports(self._reported, 1000):
            self.reports.append(entry_.report)
            self._reported = entry_.number
        return len(self.fragments)

    def learn(self) -> int:
        """Take in what came and, where something did, publish; returns the number of fragments so far."""
        before = self.position
        count = self.read()
        if self.position > before:
            self.publish()
        return count

    def sequences(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for fragment in self.fragments:
            found.setdefault(fragment.header.session, []).append(fragment.header.sequence)
        return found

    def episodes(self, *, evaluation: bool = False) -> list[Episode]:
        return [e for report in self.reports if report.evaluation == evaluation for e in report.episodes]

    def _make_probe(self) -> Probe:
        rows = np.random.default_rng(0).normal(size=(4, *self.observation.shape))
        observation = {"observation": rows.astype(self.observation.dtype)}
        return Probe(observation, self.build(99).act(observation).action)

    def _specify(self, plan: Plan) -> RunSpecification:
        made = self.settings
        return replace(
            small_run.specification(
                session_timeout_ms=plan.session_timeout_ms,
                lock_step=plan.lock_step,
                unroll_length=plan.unroll,
            ),
            seed=7,
            environment_json=made.environment.canonical_json(),
            policy_json=made.policy.canonical_json(),
            actor_json=made.actor.canonical_json(),
            evaluation_json=made.evaluation.canonical_json(),
            workload=plan.workload,
            observation_space=self.observation,
            action_space=self.action,
            schema=self.schema,
            probe=self.probe,
        )

    def _pace(self, plan: Plan) -> Pacing:
        return Pacing(
            budget=plan.budget_fragments * self.charge,
            fragment_charge=self.charge,
            actor_count=plan.actor_count,
            lock_step=plan.lock_step,
            session_timeout_ms=plan.session_timeout_ms,
            max_log_bytes=plan.max_log_bytes,
            max_log_entries=10_000,
        )


class ActorThread:
    """An actor in this process, drained when its block ends; `code` or `error` is set when it has ended."""

    def __init__(self, address: str, actor_id: str, role: Role = Role.ROLLOUT, **actor: Any) -> None:
        self.lifecycle = Lifecycle("actor" if role is Role.ROLLOUT else "evaluator")
        self.code: int | None = None
        self.error: BaseException | None = None
        made = configuration.load([{"actor": actor}] if actor else [])
        arguments = {"broker": address, "actor_id": actor_id, "role": role, "settings": made}
        self._thread = threading.Thread(target=self._run, args=(arguments,), daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.drain()

    def _run(self, arguments: dict[str, Any]) -> None:
        try:
            self.code = process.main(self.lifecycle, **arguments)
        except BaseException as error:  # noqa: BLE001 - handed to the test
            self.error = error

    def join(self) -> int | BaseException | None:
        """Wait for its end; the exit code, or what it raised."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the actor did not end"
        return self.code if self.error is None else self.error

    def drain(self) -> int | BaseException | None:
        self.lifecycle.drain("the test is over")
        return self.join()


def launch_actor(address: str, actor_id: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", PROGRAM, address, actor_id])
