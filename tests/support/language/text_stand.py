"""A server of text over a tiny model that has learned one dialogue by heart, in a running loop.

user     sum               assistant  a call of `add`
tool     3                 assistant  a call of `lookup`
tool     sea               assistant  done
"""

import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from torch.nn import functional

from penstock.actor.serving.experience import NumberedWhenSent
from penstock.config.settings import CanarySection, ServingSection
from penstock.policy.weights import encode
from penstock.protocol.fragment import Fragment
from penstock.protocol.schema import fragment_schema
from penstock.protocol.spaces import Discrete
from penstock.protocol.specification import RunSpecification
from penstock.workloads.language.conversation import ChatEncoder
from penstock.workloads.language.engine import ContinuousEngine, LoadedPolicies
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
from tests.support.language.chat_words import chat_tokenizer

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
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.trained().values():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))
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
        self.engine = ContinuousEngine(LoadedPolicies(policy), eos_id=EOS, pad_id=PAD, seed=3)
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

    def start(self, name: str = "", **fields: Any) -> str:
        """The id of a new conversation."""
        return self.conversations.start("", name, **fields).id

    def fragments(self) -> list[Fragment]:
        """What is sent to the learner, from the first session."""
        assert self.queue is not None
        return NumberedWhenSent(self.queue).claim_next(1, 1, 0)


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
