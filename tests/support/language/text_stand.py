import asyncio
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import grpc
import torch
from torch.nn import functional

from penstock.actor.serving.experience import NumberedWhenSent
from penstock.client.text_calls import DEADLINE_S, HttpReply, HttpRequest
from penstock.config.settings import CanarySection, EnvironmentSection, PolicySection, ServingSection
from penstock.gateway.frame.route_access import make_app
from penstock.gateway.http_server import HttpServer
from penstock.gateway.text_api import DESCRIBE_S, FIRST, Agents
from penstock.gateway.text_listener import text_listener
from penstock.gateway.upstream import REACH_S, RunAddresses, ServedText, Upstream
from penstock.policy.weights import encode
from penstock.protocol.fragment import Fragment, read_payload
from penstock.protocol.schema import fragment_schema
from penstock.protocol.spaces import Discrete
from penstock.protocol.specification import RunSpecification
from penstock.rpc.auth import Credentials
from penstock.runtime import metrics
from penstock.workloads.language.conversation import ChatEncoder
from penstock.workloads.language.engine import ContinuousEngine, LoadedPolicies
from penstock.workloads.language.guard import Guard, Rule
from penstock.workloads.language.language_model import make_probe
from penstock.workloads.language.policy import LanguagePolicy, LanguageSection
from penstock.workloads.language.pretraining import tiny_models
from penstock.workloads.language.prompt import Message, ToolCall
from penstock.workloads.language.serving.conversations import ColumnExperience, Conversations, Limits
from penstock.workloads.language.serving.text_answerer import (
    AdapterVersions,
    AnswerGuard,
    TextAnswerer,
    ThinkingForm,
)
from penstock.workloads.language.serving.text_request import TextReply, TextRequest
from penstock.workloads.language.serving.text_server import TextService
from penstock.workloads.plugin.serving import CanaryMonitor, Episodes, ServedQueue, Weights
from tests.support.language.tiny_models import chat_tokenizer, move
from tests.support.run import harness
from tests.support.run.harness import BrokerProcess
from tests.support.run.serving_run import RUN, ServedRun

# ---- A server of text over a tiny model that has learned one dialogue by heart, in a running loop.


ADD: Final = '{"name":"add","arguments":{"a":1}}'
LOOKUP: Final = '{"name":"lookup","arguments":{"of":"sea"}}'
WORDS: Final = (
    "sum",
    "3",
    "sea",
    "done",
    "<tool_call>",
    "</tool_call>",
    ADD,
    LOOKUP,
    "other",
    "add",
    "lookup",
)
TOOLS: Final[tuple[dict[str, Any], ...]] = tuple(
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("add", "lookup")
)
TOKENIZER: Final = chat_tokenizer(*WORDS)
EOS, PAD = TOKENIZER.eos_token_id, TOKENIZER.pad_token_id
UNROLL: Final = 47
FAR: Final = 1e9


def answers_by_heart() -> tuple[str, ...]:
    """What the model says, turn by turn."""
    return (f"<tool_call> {ADD} </tool_call>", f"<tool_call> {LOOKUP} </tool_call>", "done")


def make_model(folder: Path) -> Path:
    """The model, in a folder."""
    tiny_models.save(_taught(), TOKENIZER, folder)
    return folder


@cache
def _taught(steps: int = 150) -> Any:
    """Taught once in a process."""
    model = tiny_models.build_model(TOKENIZER, seed=0)
    asked = ("<system> add lookup <eos> <user> sum <eos> <assistant>", "<tool> 3 <eos> <assistant>")
    text = " ".join(
        f"{prompt} {answer} <eos>"
        for prompt, answer in zip((*asked, "<tool> sea <eos> <assistant>"), answers_by_heart(), strict=True)
    )
    without_tools = text.removeprefix("<system> add lookup <eos> ")
    rows = [TOKENIZER(one, add_special_tokens=False)["input_ids"] for one in (text, without_tools)]
    teach(model, rows, steps)
    return model


def teach(model: Any, rows: Sequence[Sequence[int]], steps: int) -> None:
    """Have a model know rows of ids by heart."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model.train()
    for _ in range(steps):
        losses = []
        for row in rows:
            logits = model(input_ids=torch.tensor([row])).logits[0, :-1]
            losses.append(functional.cross_entropy(logits, torch.tensor(row[1:])))
        loss = torch.stack(losses).sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    model.eval()


def adapter(base: Path, seed: int, *, size: float = 1e-3) -> bytes:
    """Weights of an adapter on the model, moved away from it by noise of this seed."""
    policy = policy_of(base)
    move(policy.trained().values(), seed, size)
    return encode(policy.published)


def policy_of(base: Path) -> LanguagePolicy:
    """With a new adapter."""
    return LanguagePolicy(LanguageSection(model=str(base), rank=4), seed=0)


def specification() -> RunSpecification:
    """Of a run of this model."""
    tokens = Discrete(len(TOKENIZER))
    return RunSpecification(
        run="text",
        seed=3,
        environment_json="{}",
        policy_json="{}",
        actor_json="{}",
        evaluation_json="{}",
        workload="rlhf",
        observation_space=tokens,
        action_space=tokens,
        schema=fragment_schema(tokens, tokens),
        probe=make_probe(len(TOKENIZER), 0),
        unroll_length=UNROLL,
        lock_step=False,
        session_timeout_ms=30_000,
        max_reward=100.0,
    )


def plain_log_prob(engine: ContinuousEngine, version: int, ids: Sequence[int], start: int) -> list[float]:
    """Log-probabilities of ids[start:] behind what is before each, by one plain pass."""
    with engine._before_next_step(), torch.inference_mode(), engine._loaded.using(version) as policy:
        tokens = torch.tensor([list(ids)])
        logits = policy.network(input_ids=tokens, use_cache=False).logits[0, start - 1 : -1]
        log_probs = logits.log_softmax(-1)
        return [float(one) for one in log_probs.gather(1, tokens[0, start:, None])[:, 0]]


class Caller:
    """Of a call of gRPC, as far as the service asks it."""

    def time_remaining(self) -> float:
        """In seconds."""
        return 60.0


class Line:
    """The line to a run, as far as experience needs it: what is queued stays there."""

    queue: ServedQueue | None = None

    def send_queued(self) -> None:
        """Nothing is sent."""


class TextStand:
    """Everything of a server but its process. `now_s`: what conversations take for the time."""

    def __init__(
        self,
        base: Path,
        *,
        learns: bool = True,
        feedback: Any = None,
        guard: AnswerGuard | None = None,
        form: ThinkingForm | None = None,
        tokenizer: Any = TOKENIZER,
        **serving: Any,
    ) -> None:
        """tokenizer: of as many words as the usual one."""
        self.section, self.now_s = ServingSection(**serving), 0.0
        self.base, self.weights = base, dict[int, Weights]()
        self.specification, policy = specification(), policy_of(base)
        self.engine = ContinuousEngine(LoadedPolicies(policy), end_ids=(EOS,), pad_id=PAD, seed=3)
        now = lambda: self.now_s  # noqa: E731 - two uses
        self.withdrawn: list[tuple[int, str]] = []
        monitor = CanaryMonitor(
            CanarySection(), lambda version, why: self.withdrawn.append((version, why)), now
        )
        self.versions = AdapterVersions(self.engine, policy, self.weights.get, self.section)
        line: Any = Line()
        learns = learns and form is None
        self.experience = ColumnExperience(self.specification, self.section, line, PAD) if learns else None
        self.queue: ServedQueue | None = line.queue
        self.limits = Limits(
            most_tokens=64,
            column_tokens=UNROLL + 1,
            answer_tokens=6,
            vocabulary=len(TOKENIZER),
            most_lag=8,
            thought_tokens=0 if form is None else form.most,
            thought_room=0 if form is None else form.room,
        )
        self.conversations = Conversations(
            self.section,
            self.limits,
            ChatEncoder(tokenizer),
            self.versions,
            TextAnswerer(self.engine, tokenizer, self.section, 32, monitor.answered, guard, form),
            Episodes(self.section, UNROLL),
            self.experience,
            feedback,
            monitor,
            now,
        )
        self.service = TextService("text", self.section, self.conversations, self.versions)

    async def publish(self, version: int, blob: bytes | None = None) -> None:
        """The learner's newest weights."""
        self.weights[version] = Weights(version, version - 1, blob or adapter(self.base, version))
        await self.versions.take_probed(self.weights[version], self.specification.probe)

    async def say(self, conversation_id: str, *messages: Message, **fields: Any) -> TextReply:
        """TextRequest for the answer to these messages, with the tools."""
        asked: dict[str, Any] = {"messages": messages, "conversation_id": conversation_id, "tools": TOOLS}
        ask = TextRequest(**(asked | fields))
        return await self.conversations.generate(ask, FAR)

    async def stream(self, *messages: Message, **fields: Any) -> tuple[TextReply, list[str]]:
        """The answer in a new conversation, and the parts that were shown of it."""
        asked: dict[str, Any] = {"messages": messages, "conversation_id": self.start(), "tools": TOOLS}
        shown = list[str]()
        ask = TextRequest(**(asked | fields))
        return await self.conversations.generate(ask, FAR, lambda _, part: shown.append(part)), shown

    def start(self, name: str = "", **fields: Any) -> str:
        """The id of a new conversation."""
        return self.conversations.start("", name, **fields).id

    def end(self, conversation: str, reward: float | None = 1.0) -> tuple[float, int]:
        """Its return and its turns."""
        return self.conversations.end(conversation, "e", terminated=True, abandoned=False, reward=reward)

    def sweep_at(self, now_s: float) -> None:
        self.now_s = now_s
        self.conversations.sweep()

    def fragments(self) -> list[Fragment]:
        """What is sent to the learner, from the first session."""
        assert self.queue is not None
        return NumberedWhenSent(self.queue).claim_next(1, 1, 0)


def guard_of(pattern: str, penalty: float = 0.0) -> AnswerGuard:
    """Of one rule, `banned`."""
    return AnswerGuard(guard=Guard((Rule("banned", re.compile(pattern)),)), penalty=penalty)


def unlearned(reason: str) -> float:
    """Tokens that were drawn and are not learned from, for this reason."""
    return float(metrics.NOT_LEARNED_STEPS.labels(reason)._value.get())


def trained_tokens(fragment: Fragment) -> tuple[int, ...]:
    """What is learned from in the first column."""
    tensors = read_payload(fragment.header, fragment.payload)
    return tuple(tensors["action"][tensors["valid"][:, 0], 0].tolist())


@asynccontextmanager
async def running(stand: TextStand) -> AsyncIterator[TextStand]:
    """With version 1, and its engine running until the block ends."""
    over = threading.Event()
    thread = threading.Thread(target=stand.engine.run, args=(over.is_set,), daemon=True)
    thread.start()
    await stand.publish(1)
    try:
        yield stand
    finally:
        over.set()
        thread.join()


def user(text: str = "sum") -> Message:
    """What a user says."""
    return Message("user", text)


def tool(text: str, call: ToolCall) -> Message:
    """What a tool answers."""
    return Message("tool", text, tool_call_id=call.id)


# ---- A server of text on an address, in a thread with a loop of its own, and the agents' API before it.


PATIENCE_S = 60.0


@contextmanager
def served_text(base: Path, socket: Path, **serving: Any) -> Iterator[TextStand]:
    """The stand, whose service answers at `unix:SOCKET`; version 1 is published."""
    loop, made = asyncio.new_event_loop(), dict[str, Any]()
    begun = threading.Event()

    async def serve() -> None:
        async with running(TextStand(base, **serving)) as stand:
            made["stand"], made["end"] = stand, asyncio.Event()
            server = grpc.aio.server()
            stand.service.add_to(server)
            server.add_insecure_port(f"unix:{socket}")
            await server.start()
            begun.set()
            await made["end"].wait()
            await server.stop(0)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    try:
        assert begun.wait(PATIENCE_S)
        yield made["stand"]
    finally:
        loop.call_soon_threadsafe(made["end"].set)
        thread.join()
        loop.close()


@contextmanager
def agents_api(place: Path | str, deadline_s: float = DEADLINE_S) -> Iterator[str]:
    """The agents' API over a server at a socket or an address, as `base_url` of a client."""
    address = f"unix:{place}" if isinstance(place, Path) else place
    with agents_api_over({FIRST: address}, deadline_s) as base_url:
        yield base_url


@contextmanager
def agents_api_over(
    addresses: Mapping[str, str],
    deadline_s: float = DEADLINE_S,
    reach_s: float = REACH_S,
    describe_s: float = DESCRIBE_S,
) -> Iterator[str]:
    """The same over several servers, by the names of agents."""
    served = {
        name: ServedText(upstream_at(address), deadline_s=deadline_s, reach_s=reach_s)
        for name, address in addresses.items()
    }
    server = HttpServer(make_app(text_listener(Agents(served, describe_s).answer)), "127.0.0.1:0")
    server.start()
    try:
        yield f"{server.url}/v1"
    finally:
        server.stop()


def upstream_at(address: str) -> Upstream:
    """A run of which the address of its server of text is known, and nothing else."""
    return Upstream(addresses=lambda: RunAddresses(server=address), credentials=Credentials())


def relay_to(upstream: Upstream) -> Callable[[HttpRequest], Awaitable[HttpReply]]:
    """What a gateway answers before the server of one run."""
    return Agents({FIRST: ServedText(upstream)}).answer


# ---- A model that has learned by heart to think before it answers, and how it thinks.


OPENS, END, CLOSES, DIRECTLY = "sea", "done", "lookup", "3"
THOUGHT: Final = "lookup 3"
BEHIND, WITHOUT = "add", "other"
"""What is answered with a thought, and without one."""
MOST: Final = 5


def ids(text: str) -> tuple[int, ...]:
    """Its tokens."""
    return tuple(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def form_of(**fields: Any) -> ThinkingForm:
    """How it thinks."""
    usual: dict[str, Any] = {
        "opens": ids(OPENS),
        "end": ids(END)[0],
        "closes": ids(CLOSES),
        "directly": ids(DIRECTLY),
        "most": MOST,
    }
    return ThinkingForm(**(usual | fields))


def make_thinker(folder: Path) -> Path:
    """The model, in a folder."""
    model = tiny_models.build_model(TOKENIZER, seed=0)
    asked = "<user> sum <eos> <assistant>"
    rows = (f"{asked} {OPENS} {THOUGHT} {END} {CLOSES} {BEHIND} <eos>", f"{asked} {DIRECTLY} {WITHOUT} <eos>")
    teach(model, [ids(row) for row in rows], 150)
    tiny_models.save(model, TOKENIZER, folder)
    return folder


# ---- A run's folder with versions of a model that knows a dialogue by heart, for `penstock serve`.


GOOD: Final = 1e-3
"""Noise of an adapter that leaves the model as it is."""
BAD: Final = 0.5
"""Of one under which it knows the dialogue no more."""


@dataclass(frozen=True)
class ServedTextRun(ServedRun):
    """See `ServedRun`; its versions are adapters of the model in `base`."""

    base: Path = Path()

    def specification(self) -> RunSpecification:
        """Of `text_stand`, with this folder's model."""
        environment = EnvironmentSection(id="text", kwargs={"model": str(self.base), "response_tokens": 6})
        policy = PolicySection(kwargs={"model": str(self.base), "rank": 4})
        return replace(
            specification(),
            run=RUN,
            environment_json=environment.canonical_json(),
            policy_json=policy.canonical_json(),
        )

    def add(self, version: int, size: float) -> int:
        """A version whose adapter is noise of this size; its number."""
        self.keep(version, adapter(self.base, version, size=size))
        return version


def begun(folder: Path) -> ServedTextRun:
    """A run with version 1, active."""
    made = ServedTextRun(folder / "run", base=make_model(folder / "model"))
    made.describe()
    made.promote(made.add(1, GOOD))
    return made


@contextmanager
def serving_text(run: ServedTextRun, **settings: Any) -> Iterator[BrokerProcess]:
    """`penstock serve` over it, ready."""
    places = {"actor.places.model": str(run.base)}
    with harness.server(run.folder.parent, run.folder, **places, **settings) as server:
        yield server
