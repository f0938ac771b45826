import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np
import torch
from torch import nn

from penstock.actor.serving.batcher import Answered, Batcher, Loaded, Question
from penstock.actor.serving.episodes import Episodes
from penstock.actor.serving.experience import Learning, ServedQueue
from penstock.actor.serving.loaded_versions import LoadedVersions, Weights
from penstock.actor.serving.policy_service import PolicyService
from penstock.actor.serving.release import CanaryMonitor
from penstock.actor.serving.request_handler import RequestHandler
from penstock.actor.serving.shadow import ShadowRecord
from penstock.actor.specification import policy_maker
from penstock.config.settings import ActorSection, CanarySection, PolicySection, ServingSection
from penstock.learner.batch import check_meaning
from penstock.policy.policy import Policy, build
from penstock.policy.weights import encode
from penstock.protocol.fragment import Fragment, check
from penstock.protocol.refusal import Reason, Refusal, Refused
from penstock.protocol.schema import fragment_schema
from penstock.protocol.spaces import Box, Discrete, Space, flatten
from penstock.protocol.specification import Probe, RunSpecification
from penstock.protocol.tensor import to_tensor
from penstock.v1 import policy_pb2 as pb

RUN: Final = "served-run"
OBSERVATION: Final = Box(np.full(4, -10, np.float32), np.full(4, 10, np.float32))
ACTION: Final = Discrete(3)
FAR: Final = 1e12
"""A time that never comes."""


def specification(
    observation: Space = OBSERVATION,
    action: Space = ACTION,
    *,
    unroll: int = 4,
    stale_after: int = 0,
    **policy: Any,
) -> RunSpecification:
    section = PolicySection(**({"hidden_sizes": (16, 16)} | policy))
    return RunSpecification(
        run=RUN,
        seed=0,
        environment_json="{}",
        policy_json=section.canonical_json(),
        actor_json=ActorSection().canonical_json(),
        evaluation_json="{}",
        workload="control",
        observation_space=observation,
        action_space=action,
        schema=fragment_schema(observation, action),
        probe=Probe({}, {}),
        unroll_length=unroll,
        lock_step=False,
        session_timeout_ms=30_000,
        stale_after=stale_after,
    )


def policy_of(made: RunSpecification, seed: int) -> Policy:
    """A policy of the run; its logits are spread, so that versions differ visibly."""
    section = PolicySection.model_validate_json(made.policy_json)
    policy = build(made.observation_space, made.action_space, section, seed)
    nn.init.normal_(policy.actor_head.weight, std=0.5, generator=torch.Generator().manual_seed(seed))
    return policy


def loaded_of(made: RunSpecification, version: int = 1, seed: int | None = None) -> Loaded:
    return Loaded(policy_of(made, version if seed is None else seed), version, version, "ab")


def broken(policy: Policy, value: float = float("nan")) -> Policy:
    """The same with an actor that answers with no numbers."""
    nn.init.constant_(policy.actor_head.bias, value)
    return policy


def rows_of(rows: int, seed: int = 0) -> dict[str, Any]:
    drawn = np.random.default_rng(seed).normal(size=(rows, *OBSERVATION.shape))
    return {"observation": drawn.astype(np.float32)}


def question_of(rows: int = 1, drawn: int = 0, **wishes: Any) -> Question:
    """A question of so many rows; `drawn`: which."""
    return Question(observation=rows_of(rows, drawn), rows=rows, **wishes)


def parts_of(space: Space, value: Any) -> list[pb.Part]:
    return [
        pb.Part(path=path, value=to_tensor(np.asarray(leaf))) for path, leaf in flatten(space, value).items()
    ]


def seen(step: int, episode: int = 0) -> Any:
    """An observation that says where it comes from."""
    return np.array([episode, step, 0.5, -0.5], np.float32)


def reason_of(error: BaseException | None) -> Reason:
    assert isinstance(error, Refused), error
    return error.refusal.reason


class _Monitor(CanaryMonitor):
    """Keeps in `told` what it is told, too."""

    def __init__(self, told: deque[Answered], *judging: Any) -> None:
        super().__init__(*judging)
        self._told = told

    def answered(self, answered: Answered) -> None:
        self._told.append(answered)
        super().answered(answered)


class Stand:
    """Made in a running loop.

    `now_s`: what episodes take for the time; `withdrawn`: what the canary's trial found worse.
    """

    def __init__(
        self,
        made: RunSpecification | None = None,
        *,
        learns: bool = True,
        record: ShadowRecord | None = None,
        canary: Mapping[str, Any] | None = None,
        **serving: Any,
    ) -> None:
        self.specification = made or specification()
        self.section, judging = ServingSection(**serving), CanarySection(**(canary or {}))
        self.now_s = 0.0
        self.weights: dict[int, Weights] = {}
        self.fetched: list[int] = []
        self.withdrawn: list[tuple[int, str]] = []
        self.loaded_versions = LoadedVersions(policy_maker(self.specification), self._fetch, self.section)
        self.batcher = Batcher(max_rows=256, max_wait_s=0.0, max_delay_s=FAR)
        self.queue = ServedQueue(self.section.outbox_fragments, self.specification.stale_after)
        self.episodes = Episodes(self.section, self.specification.unroll_length)
        now = lambda: self.now_s  # noqa: E731 - three uses
        self.told = deque[Answered](maxlen=32)
        self.canary_monitor = _Monitor(
            self.told, judging, lambda version, why: self.withdrawn.append((version, why)), now
        )
        self.learning = self._learning() if learns else None
        spaces = (self.specification.observation_space, self.specification.action_space)
        state = policy_maker(self.specification)().state_space
        self.handler = RequestHandler(
            self.section,
            (*spaces, state),
            self.loaded_versions,
            self.batcher,
            record,
            self.episodes,
            self.learning,
            None,
            self.canary_monitor,
            now,
        )
        self._requests = 0

    def _learning(self) -> Learning:
        return Learning(self.specification, self.section, self.queue, lambda: None, compress=False)

    def _fetch(self, version: int) -> Weights | None:
        self.fetched.append(version)
        return self.weights.get(version)

    def service(self) -> PolicyService:
        made = self.specification
        described = (made.run, made.observation_space, made.action_space)
        return PolicyService(self.handler, self.section, described)

    def keep(self, version: int, *, policy: Policy | None = None) -> Weights:
        """Hold a version's weights where the loaded versions finds them."""
        policy = policy or policy_of(self.specification, version)
        self.weights[version] = Weights(version, version, encode(policy))
        return self.weights[version]

    async def publish(self, version: int, *, policy: Policy | None = None) -> None:
        """The learner's newest weights; update and version have the same number."""
        await self.loaded_versions.take_latest(self.keep(version, policy=policy))

    def new_id(self) -> str:
        self._requests += 1
        return f"request-{self._requests}"

    def start(self, client_key: str = "ada", **fields: Any) -> str:
        request = pb.StartEpisodeRequest(client_key=client_key, **({"request_id": self.new_id()} | fields))
        return self.handler.start(request).episode_id

    def asking(self, observation: Any, **fields: Any) -> pb.ActRequest:
        space = self.specification.observation_space
        return pb.ActRequest(
            **({"request_id": self.new_id(), "observation": parts_of(space, observation)} | fields)
        )

    async def answer(self, request: pb.ActRequest, until_s: float) -> tuple[pb.ActReply, Answered]:
        """What a request without an episode gets, as its caller reads it; raises Refused."""
        written = await self.reply(request, until_s)
        write = self.handler.writer.reply
        told = [one for one in self.told if one.fallback != "none"]
        same = [one for one in told if write(request, one).SerializeToString() == written]
        return pb.ActReply.FromString(written), same[-1]

    async def reply(self, request: pb.ActRequest, until_s: float) -> bytes:
        """What any request gets; raises Refused."""
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def say(said: bytes | Exception) -> None:
            if isinstance(said, Exception):
                reply.set_exception(said)
            elif not reply.done():
                refusal = Refusal.from_proto(pb.ActReply.FromString(said).refusal)
                reply.set_result(said) if refusal is None else reply.set_exception(Refused(refusal))

        self.handler.act(request, until_s, say, reply.done)
        return await reply

    async def act(self, episode: str, observation: Any, **fields: Any) -> pb.ActReply:
        request = self.asking(observation, episode_id=episode, **fields)
        return pb.ActReply.FromString(await self.reply(request, FAR))

    async def reward(self, episode: str, *steps: tuple[int | None, float], request_id: str = "") -> int:
        """Rewards; how many were late."""
        rewards = [pb.StepReward(step=step, amount=amount) for step, amount in steps]
        request = pb.RewardRequest(
            episode_id=episode, request_id=request_id or self.new_id(), rewards=rewards
        )
        return (await self.handler.reward(request)).late

    def end(self, episode: str, ending: pb.Ending.ValueType, **fields: Any) -> pb.EndEpisodeReply:
        final = fields.pop("final", None)
        parts = [] if final is None else parts_of(self.specification.observation_space, final)
        return self.handler.end(
            pb.EndEpisodeRequest(
                episode_id=episode,
                ending=ending,
                final_observation=parts,
                **({"request_id": self.new_id()} | fields),
            )
        )

    async def play(self, episode: str, steps: int, first: int = 0) -> None:
        for step in range(first, first + steps):
            earned = {"reward": float(step - 1)} if step > 0 else {}
            await self.act(episode, seen(step), **earned)

    def fragments(self, update: int = 0) -> list[Fragment]:
        """What waits to be sent, numbered and checked as broker and learner do."""
        found: list[Fragment] = []
        while batch := self.queue.exchange([], update):
            found += batch
        return [self._checked(fragment, number) for number, fragment in enumerate(found, 1)]

    def _checked(self, fragment: Fragment, number: int) -> Fragment:
        numbered = replace(fragment, header=replace(fragment.header, session=1, sequence=number))
        check(numbered, self.specification.schema, RUN)
        check_meaning(numbered.header, numbered.arrays())
        return numbered


async def ready(made: RunSpecification | None = None, **options: Any) -> Stand:
    """A stand with version 1."""
    stand = Stand(made, **options)
    await stand.publish(1)
    return stand


def column(fragment: Fragment, name: str) -> list[Any]:
    array: Any = fragment.arrays()[name]
    values: list[Any] = array[:, 0].tolist()
    return values


def steps_seen(fragments: Sequence[Fragment]) -> list[list[int]]:
    """Index of the step that each observation of `seen` shows, by fragment."""
    return [[int(row[1]) for row in column(fragment, "observation")] for fragment in fragments]


def named(described: Mapping[str, Any] | None) -> dict[str, Any]:
    assert described is not None
    return dict(described)


PATIENCE_S: Final = 60.0


class ServedStand:
    """A stand, whose calls are made in its own loop."""

    def __init__(self, stand: Stand, loop: asyncio.AbstractEventLoop) -> None:
        self.stand, self._loop = stand, loop

    def run(self, make: Callable[[Stand], Coroutine[Any, Any, Any]]) -> Any:
        return asyncio.run_coroutine_threadsafe(make(self.stand), self._loop).result(PATIENCE_S)

    def publish(self, version: int) -> None:
        """The learner's newest weights."""
        self.run(lambda stand: stand.publish(version))


@contextmanager
def served_policy(made: RunSpecification, socket: Path, **serving: Any) -> Iterator[ServedStand]:
    """The stand, which answers at `unix:SOCKET` once a version is published."""
    loop, found = asyncio.new_event_loop(), dict[str, Any]()
    begun = threading.Event()

    async def serve() -> None:
        stand = found["stand"] = Stand(made, **serving)
        found["end"] = asyncio.Event()
        server = grpc.aio.server()
        stand.service().add_to(server)
        server.add_insecure_port(f"unix:{socket}")
        await server.start()
        begun.set()
        await found["end"].wait()
        await server.stop(0)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    try:
        assert begun.wait(PATIENCE_S)
        yield ServedStand(found["stand"], loop)
    finally:
        loop.call_soon_threadsafe(found["end"].set)
        thread.join()
        loop.close()
