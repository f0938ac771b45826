"""The state of the API: clients of the run, chains of transitions, and the last answers.

None of it is stored: transitions are in the run. When the API ends, its open chains end as truncated.
"""

import asyncio
import base64
import logging
import math
import secrets
import struct
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.client import Action, Arm, AsyncControlClient, AsyncPolicyClient, PolicyError
from penstock.config.configuration_error import ConfigurationError
from penstock.gateway.frame.requests import ApiError
from penstock.gateway.upstream import RunAddresses, Upstream, answered, no_registry, not_yet
from penstock.protocol.tensor import Array
from penstock.registry.ratings import Rating
from penstock.registry.registry import Registry
from penstock.workloads.language.reward.reward_source import RewardError
from penstock.workloads.prompts.categories import QualityReward, classify
from penstock.workloads.prompts.checked_reward import Better, Check, CheckedReward, NeedsPerson
from penstock.workloads.prompts.embeddings import EmbeddingError, HashingEmbedder, Rows
from penstock.workloads.prompts.features import MUTATION_TYPES, PromptError, mutate, offered, read_prompt
from penstock.workloads.prompts.http import api_bodies as bodies
from penstock.workloads.prompts.http.run_learning import (
    Chains,
    GivenAnswer,
    GivenAnswers,
    RunLearning,
    Step,
    state_key,
)
from penstock.workloads.prompts.task_parts import TaskParts, parts_of

# ---- Embeddings, mutations and rewards of a prompt's text.

T = TypeVar("T")

MOST_WORK_WAITING: Final = 64
"""Most texts that are worked on, or wait for a thread, at the same time."""
_THREADS: Final = 8
_LONG: Final = 2000
"""Characters above which a text is worked on in a thread."""


class PromptWork:
    """Runs the parts of a task for one event loop.

    It has its own threads, so that a slow source delays nothing else.
    """

    def __init__(self, parts: TaskParts) -> None:
        self.parts = parts
        self._waiting, self._threads = 0, ThreadPoolExecutor(_THREADS, "prompts")
        self._is_quick = isinstance(parts.embedder, HashingEmbedder) and isinstance(
            parts.reward, QualityReward | None
        )

    @property
    def rewarded_by(self) -> bodies.RewardedBy:
        if self.parts.reward is None:
            return "ratings"
        return "quality" if isinstance(self.parts.reward, QualityReward) else "source"

    @property
    def checked(self) -> CheckedReward | None:
        return self.parts.reward if isinstance(self.parts.reward, CheckedReward) else None

    def close(self) -> None:
        """Close the parts without waiting for running work."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.parts.close()

    async def do(self, text: str, work: Callable[[], T]) -> T:
        """Run work on a text, in a thread where it may be slow; raises ApiError where a source fails."""
        if self._is_quick and len(text) <= _LONG:
            return work()
        if self._waiting >= MOST_WORK_WAITING:
            raise ApiError(503, f"{self._waiting} texts are being worked on: try again", retry_s=1)
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except NeedsPerson as error:
            raise ApiError(409, str(error)) from error
        except (EmbeddingError, RewardError) as error:
            raise ApiError(502, str(error), error="bad_gateway") from error
        finally:
            self._waiting -= 1

    def row(self, prompt: str) -> Rows:
        """Return the embedding of a prompt, float32 [1536]."""
        found: Rows = self.parts.embedder.embed([prompt])[0]
        return found

    def embedded(self, prompt: str, encoding: str) -> bodies.EmbedAnswer:
        return bodies.EmbedAnswer(
            embedding=self._encoded(prompt, encoding),
            category=classify(prompt),
            offered=list(offered(prompt)),
        )

    def earned(self, start: str, before: str, after: str) -> float | None:
        return None if self.parts.reward is None else self.parts.reward.of(start, before, after)

    def mask(self, text: str) -> NDArray[np.bool_]:
        """Return which mutations a text may have, bool [5]."""
        return np.array(offered(text), np.bool_)

    def step(
        self, start: str, before: str, action: int, *, embedded: bool
    ) -> tuple[str, float | None, Rows | None]:
        """Return the text after a mutation, the step's reward, and with `embedded` the text's embedding."""
        after = mutate(before, action)
        return after, self.earned(start, before, after), self.row(after) if embedded else None

    def mutated(self, start: str, prompt: str, body: bodies.MutateRequest) -> bodies.MutateAnswer:
        text = mutate(prompt, body.action)
        return bodies.MutateAnswer(
            prompt=text,
            action=body.action,
            mutation_type=MUTATION_TYPES[body.action],
            reward=self.earned(start, prompt, text) if body.rewarded else None,
            category=classify(start),
            changed=text != prompt,
            embedding=None if body.encoding == "none" else self._encoded(text, body.encoding),
        )

    def _encoded(self, prompt: str, encoding: str) -> list[float] | str:
        row = self.row(prompt)
        if encoding == "base64":
            return base64.b64encode(row.astype("<f4").tobytes()).decode()
        return numbers(row)


def numbers(array: Any) -> list[float]:
    return [float(number) for number in np.asarray(array).reshape(-1)]


def checked_prompt(text: str, field: str = "prompt") -> str:
    try:
        return read_prompt(text, field)
    except PromptError as error:
        raise ApiError(422, str(error), field=field) from error


# ---- Paths that were returned and can be rated.

KEPT: Final = 64
"""Paths that are stored, of all callers."""
POLICY: Final = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownPath:
    """A path. steps: its transitions for training; empty for a path that was not drawn."""

    caller: str
    start: str
    prompt: str
    version: int
    steps: tuple[Step, ...] = ()
    id: str = field(default_factory=lambda: secrets.token_hex(12))


class ShownPaths:
    """The newest paths; used by one event loop."""

    def __init__(self) -> None:
        self._paths: OrderedDict[str, ShownPath] = OrderedDict()

    def keep(self, path: ShownPath) -> str:
        """Store a path, drop the oldest beyond KEPT, and return its id."""
        self._paths[path.id] = path
        while len(self._paths) > KEPT:
            self._paths.popitem(last=False)
        return path.id

    def take(self, caller: str, id_: str) -> ShownPath:
        """Remove a path, so that it is rated once, and return it; raises ApiError 404."""
        found = self._paths.get(id_)
        if found is None or found.caller != caller:
            raise ApiError(404, "id: this path is unknown, or was rated: request another one", field="id")
        return self._paths.pop(id_)


MOST_WAITING: Final = 4096
"""Most steps that wait for an update."""
OFF_BY: Final = math.log(2)
"""Largest error, in nats, of the log-probability of an unverified transition."""
_DEADLINE_S: Final = 10.0
_LOOK_S: Final = 1.0
_VERSION_S: Final = 5.0
_VERSION_LOOK_S: Final = 0.02
_REWARDS_KEPT: Final = 100

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class PromptsApi:
    """The state behind the routes; used by one event loop."""

    upstream: Upstream
    most_waiting: int = MOST_WAITING
    given: GivenAnswers = field(default_factory=GivenAnswers)
    learning: RunLearning = field(default_factory=RunLearning)
    unverified: int = 0
    episodes: int = 0
    returns: deque[float] = field(default_factory=lambda: deque(maxlen=_REWARDS_KEPT))
    chains: Chains = field(init=False)
    _addresses: RunAddresses = field(default_factory=RunAddresses)
    _client: AsyncPolicyClient | None = None
    _control: AsyncControlClient | None = None
    shown: ShownPaths = field(default_factory=ShownPaths)
    _work: PromptWork | None = None
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    _registry: str = ""
    _looked_s: float = -math.inf
    _version: int = 0

    def __post_init__(self) -> None:
        self.chains = Chains(self._ended)

    # ------------------------------------------------------------ the run

    async def client(self) -> AsyncPolicyClient:
        await self._connect()
        if self._client is None:
            raise not_yet("its policy server has not come up")
        return self._client

    async def control(self) -> AsyncControlClient:
        await self._connect()
        if self._control is None:
            raise not_yet("its broker is not known (with --server, name it by --broker)")
        return self._control

    async def keep_house(self) -> None:
        """End idle chains, and read the run's status, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self.chains.end_idle()
            if self._control is None:
                continue
            try:
                await self.learning.look(self._control)
            except PolicyError as error:
                log.warning("the run does not answer", extra={"error": str(error)})

    async def close(self) -> None:
        await self.chains.end_all()
        await self._close()
        if self._work is not None:
            self._work.close()

    async def _connect(self) -> None:
        """Connect to the current processes of the run; looks at most once a second while connected."""
        now_s = time.monotonic()
        if self._client is not None and now_s - self._looked_s < _LOOK_S:
            return
        self._looked_s = now_s
        found = await asyncio.to_thread(self.upstream.addresses)
        if found == self._addresses:
            return
        await self._close()
        own = self.upstream.credentials
        if found.server:
            self._client = AsyncPolicyClient(found.server, credentials=own, deadline_s=_DEADLINE_S)
        if found.broker:
            self._control = AsyncControlClient(found.broker, credentials=own)
        self._addresses = found

    async def _close(self) -> None:
        client, control = self._client, self._control
        self._client = self._control = None
        self._addresses = RunAddresses()
        if client is not None:
            await client.close()
        if control is not None:
            await control.close()

    # ------------------------------------------------------------ actions

    async def act(
        self,
        state: Array,
        *,
        deterministic: bool = False,
        distribution: bool = False,
        mask: Array | None = None,
    ) -> Action:
        """Return a version's action; raises ApiError 503 without a version.

        state: float32 [1536]. mask: bool [5], the mutations that may be chosen; None: all.
        """
        client = await self.client()
        answer = await answered(
            client.act(state, deterministic=deterministic, distribution=distribution, value=True, mask=mask)
        )
        if answer.fallback is not None or answer.log_prob is None or answer.value is None:
            raise not_yet("no version of the policy answers")
        if answer.version != self._version:
            self._note_version(answer.version)
        return answer

    async def await_version(self, update: int) -> int:
        """Return the latest version as soon as it has so many updates, or after 5 s."""
        client, until_s = await self.client(), time.monotonic() + _VERSION_S
        while True:
            description = await answered(client.describe())
            latest = [one for one in description.versions if Arm.LATEST in one.arms]
            if (latest and latest[0].update >= update) or time.monotonic() > until_s:
                return latest[0].version if latest else 0
            await asyncio.sleep(_VERSION_LOOK_S)

    @property
    def knows_its_broker(self) -> bool:
        return self._control is not None

    def _note_version(self, version: int) -> None:
        if self._version and self._control is None:
            self.learning.waiting_steps = 0  # the number of steps in the update is unknown
        self._version = version

    # ------------------------------------------------------------ transitions

    async def store(self, caller: str, body: bodies.StoreRequest) -> tuple[bool, bool]:
        """Store a transition; returns whether it belongs to an answer, and whether it was stored before."""
        client = await self.client()
        given = self._matched(caller, body)
        if given is not None and given.is_used:
            return True, True
        self._check_room()
        step = Step(
            state=body.state,
            action=body.action,
            reward=body.reward,
            next_state=body.next_state,
            done=body.done,
            log_prob=body.log_prob if given is None else given.log_prob,
            version=0 if given is None else given.version,
        )
        if given is None:
            await self._check_unverified(body)
        else:
            given.is_used = True
        try:
            await answered(self.chains.store(client, caller, step))
        except BaseException:
            if given is not None:
                given.is_used = False
            raise
        self.learning.waiting_steps += 1
        return given is not None, False

    # ------------------------------------------------------------ texts and people

    async def work(self) -> PromptWork:
        async with self._reading:
            if self._work is not None:
                return self._work
            try:
                found = await asyncio.to_thread(self.upstream.settings)
                if found is None:
                    raise not_yet("its settings have not been written")
                self._work = PromptWork(await asyncio.to_thread(parts_of, found.task))
            except ConfigurationError as error:
                raise ApiError(409, str(error)) from error
            self._registry = found.registry
            return self._work

    async def rate(self, caller: str, id_: str, score: float, *, learns: bool) -> int:
        """Store a rating of a path, and return the number of steps stored with it; raises ApiError.

        score: from 0 to 1. learns: whether ratings are the reward: the last step earns 2 · score - 1.
        """
        path = self.shown.take(caller, id_)
        steps = path.steps if learns else ()
        try:
            if steps:
                self._check_room()
            await self._keep(
                prompt=path.start,
                response=path.prompt,
                score=score,
                version=path.version or None,
                rater=path.caller,
                request_key=f"path {path.id}",
            )
        except BaseException:
            self.shown.keep(path)
            raise
        client, owner = await self.client(), f"{caller} {path.id}"  # no other transition joins its chain
        for step in steps:
            reward = 2 * score - 1 if step.done else 0.0
            await answered(self.chains.store(client, owner, replace(step, reward=reward)))
            self.learning.waiting_steps += 1
        return len(steps)

    async def keep_check(self, caller: str, check: Check, better: Better) -> None:
        texts = (check.before, check.after) if better == "before" else (check.after, check.before)
        await self._keep(
            prompt=check.start,
            response=texts[0],
            rejected=texts[1],
            rater=caller,
            request_key=f"check {check.id}",
        )

    async def _keep(self, **said: Any) -> None:
        """Store a rating, once per request key; raises ApiError, RegistryError."""
        if not self._registry:
            raise no_registry()

        def store() -> None:
            with Registry.open(self._registry, migrate=True) as opened:
                opened.add_ratings(POLICY, (Rating(source="prompts", **said),))

        await asyncio.to_thread(store)

    def _check_room(self) -> None:
        if self.learning.waiting_steps >= self.most_waiting:
            raise ApiError(
                429,
                f"{self.learning.waiting_steps} steps wait for an update: POST /update, or wait for one",
                retry_s=1,
            )

    def _matched(self, caller: str, body: bodies.StoreRequest) -> GivenAnswer | None:
        """Return the answer of a transition; None without a ticket and without a matching answer."""
        key = state_key(body.state)
        transition = state_key(body.next_state) + struct.pack("<d?", body.reward, body.done)
        if not body.ticket:
            found = self.given.unused(caller, key, body.action)
            if found is not None:
                found.found_for = transition
            return found
        given = self.given.by_ticket(caller, body.ticket)
        if given is None:
            raise ApiError(
                409,
                "ticket: it is of none of the last answers of this gateway, so whether its transition was "
                "stored already is not known; leave the ticket out to have it stored, as unverified",
                field="ticket",
            )
        if given.state != key:
            raise ApiError(
                422,
                "state: differs from the state of the ticket; send the state of the same step",
                field="state",
            )
        if given.action != body.action:
            raise ApiError(
                422,
                f"action: the ticket is of action {given.action}; send the action that was answered",
                field="action",
            )
        self.given.leave_to(caller, given, transition)
        return given

    async def _check_unverified(self, body: bodies.StoreRequest) -> None:
        answer = await self.act(body.state, distribution=True)
        log_prob = math.log(max(float(answer.distribution["probability"][body.action]), 1e-30))
        if abs(log_prob - body.log_prob) > OFF_BY:
            raise ApiError(
                422,
                "log_prob: this transition belongs to none of the last answers, and the version that answers "
                f"now gives its action a log-probability of {log_prob:.3f}: store transitions sooner, with "
                "the ticket of their answer",
                field="log_prob",
            )
        self.unverified += 1

    def _ended(self, total_return: float) -> None:
        self.episodes += 1
        self.returns.append(total_return)
