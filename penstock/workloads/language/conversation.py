"""A conversation as token ids: the chat template, open conversations, and columns of finished ones.

Sampled tokens are never tokenised again: `follow` renders the messages with a mark behind the answer, and
tokenises only the text behind the mark. A template that renders earlier messages differently once others
follow them (some leave out thoughts) cannot be continued.
"""

import json
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from penstock.config.settings import ConfigurationError
from penstock.protocol.fragment import Fragment, WeightSpan
from penstock.protocol.messages import Episode
from penstock.protocol.schema import FragmentSchema
from penstock.runtime.health import Health
from penstock.workloads.language.prompt import Message
from penstock.workloads.language.tokenizer import (
    OF_ANSWERS,
    ChatTemplate,
    Tokenizer,
    Tools,
    end_ids,
    new_mark,
)
from penstock.workloads.plugin import acting
from penstock.workloads.plugin.acting import GENERATING, LocalPolicy, Run
from penstock.workloads.plugin.fragments import (
    Ends,
    Episodes,
    HeaderFields,
    LearnerReward,
    learner_reward,
    make,
)


class NotContinued(ValueError):
    """New messages cannot follow the sampled tokens."""


class ForeignWord(ValueError):
    """A word that the model does not have. unquoted: the message without the caller's word, for logs."""

    def __init__(self, place: str, word: str, words: int) -> None:
        of = f"none of the {words} words of the model"
        super().__init__(f"{place}: {word[:40]!r} is {of}; write those, with blanks between them")
        self.unquoted = f"{place}: a word is {of}"


class ChatEncoder:
    """Used by one thread at a time; raises ValueError as `ChatTemplate`."""

    def __init__(self, tokenizer: Tokenizer, words: Collection[str] | None = None) -> None:
        """words: the words that messages may hold, separated by blanks; None: any text."""
        self._tokenizer, self._template = tokenizer, ChatTemplate(tokenizer)
        self._words = None if words is None else frozenset(words)
        self._ends = end_ids(tokenizer)
        added = {one for one in tokenizer.get_added_vocab() if one.strip()}
        ends = added.intersection(tokenizer.convert_ids_to_tokens(self._ends))
        self._controls = sorted({*self._template.controls, *ends})
        ids = tokenizer.convert_tokens_to_ids([one for one in self._controls if one not in OF_ANSWERS])
        self._control_ids = {*ids} - {tokenizer.unk_token_id}
        self.end_id = self._template.end_id

    def begin(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Return the ids of a prompt that ends where the assistant begins.

        Raises ValueError for texts with control tokens, and for messages that the template does not take.
        """
        self._check(messages, tools)
        return self._ids(self._checked(messages, tools)[1])

    def follow(
        self,
        before: Sequence[Message],
        last_id: int,
        new: Sequence[Message],
        tools: Tools = (),
        *,
        said: str = "",
    ) -> list[int]:
        """Return the ids between an answer's last token and the next answer.

        before: the messages that the answer answered. last_id: its last token, which may be an end token.
        new: the messages after it, at least one. said: the text of the answer. Raises NotContinued, and
        ValueError as `begin`.
        """
        self._check(new, tools)
        mark = new_mark()
        answered = [*before, Message("assistant", said + mark)]
        head, tail = self._checked([*answered, *new], tools, mark)
        if not self._template.render(answered, tools, opens=False).startswith(head + mark):
            raise NotContinued("messages: the chat template changes earlier messages when others follow them")
        end = self._tokenizer.convert_ids_to_tokens(last_id)
        if last_id in self._ends and tail.lstrip().startswith(end):
            tail = tail.lstrip().removeprefix(end)
        return self._ids(tail)

    def _check(self, messages: Sequence[Message], tools: Tools) -> None:
        """Raise ValueError for control tokens in texts, with which one role could pose as another."""
        for index, message in enumerate(messages):
            own = OF_ANSWERS if message.role == "assistant" else ()
            for name, text in message.texts:
                self._check_text(f"messages[{index}].{name}", text, own)
            if (known := self._words) is not None:
                for word in message.content.split():
                    if word not in known:
                        raise ForeignWord(f"messages[{index}].content", word, len(known))
        for index, tool in enumerate(tools):
            try:
                self._check_text(f"tools[{index}]", json.dumps(tool, ensure_ascii=False))
            except RecursionError as error:
                raise ValueError(f"tools[{index}]: is nested too deep: {error}") from error

    def _check_text(self, name: str, text: str, own: Collection[str] = ()) -> None:
        for control in self._controls:
            if control in text and control not in own:
                raise ValueError(
                    f"{name} holds {control!r}, which is a control token of the model: leave it out"
                )

    def _checked(self, messages: Sequence[Message], tools: Tools, mark: str = "") -> tuple[str, str]:
        """Return the rendered messages up to the mark and behind it; raises ValueError as `begin`.

        Escapes of JSON, what a template cuts out, and what the tokenizer normalises may make a control token
        that no text holds.
        """
        texts = [self._template.render(messages, tools, opens=True, harmless=one) for one in (False, True)]
        (head, _, text), (_, _, harmless) = (one.partition(mark) if mark else ("", "", one) for one in texts)
        found, usual = (Counter(self._ids(one)) for one in (text, harmless))
        for control in sorted(self._control_ids):
            if found[control] > usual[control]:
                word = self._tokenizer.convert_ids_to_tokens(control)
                raise ValueError(
                    f"messages, tools: texts of them become {word!r} in the prompt, a control token of the "
                    "model: leave it out"
                )
        return head, text

    def _ids(self, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"messages, tools: hold what is no Unicode text: {error.reason}") from error
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


# ---- A conversation as a column: all its tokens in order; those of the assistant were sampled.


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTurn:
    """The sampled tokens of one answer, and their reward.

    start: index of the first among the column's ids, at least 1. log_prob: of each token when it was sampled.
    version, update: of the weights that sampled them.
    """

    start: int
    log_prob: tuple[float, ...]
    version: int
    update: int
    reward: float = 0.0

    @property
    def end(self) -> int:
        return self.start + len(self.log_prob)


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column. ids: all tokens. turns: in order, without overlap. terminated: it ended and was not cut."""

    ids: tuple[int, ...]
    turns: tuple[SampledTurn, ...] = field(default=())
    terminated: bool = True

    @property
    def rows(self) -> int:
        return max(1, len(self.ids) - 1)


def column_tensors(columns: Sequence[Column], pad_id: int) -> dict[str, Any]:
    """Return the tensors of a fragment by name: [T, N], `observation` [T + 1, N], `final/…` [K]."""
    steps, count = max(column.rows for column in columns), len(columns)
    tokens = np.full((steps + 1, count), pad_id, np.int64)
    tensors: dict[str, Any] = {
        "observation": tokens,
        "action": tokens[1:],
        "reward": np.zeros((steps, count), np.float32),
        "log_prob": np.zeros((steps, count), np.float32),
        **{name: np.zeros((steps, count), np.bool_) for name in ("valid", "terminated", "truncated")},
    }
    ends: list[tuple[int, int]] = []
    for slot, column in enumerate(columns):
        tokens[: len(column.ids), slot] = column.ids
        for turn in column.turns:
            rows = slice(turn.start - 1, turn.end - 1)
            tensors["valid"][rows, slot] = True
            tensors["log_prob"][rows, slot] = turn.log_prob
            tensors["reward"][turn.end - 2, slot] += turn.reward
        if column.turns:
            last = column.turns[-1].end - 2
            tensors["terminated" if column.terminated else "truncated"][last, slot] = True
            ends.append((last, slot))
    step, slot_of = np.array(sorted(ends), np.int32).reshape(-1, 2).T
    final = {"final/slot": slot_of, "final/step": step, "final/observation": tokens[step + 1, slot_of]}
    return {**tensors, **final}


def weight_spans(columns: Sequence[Column], steps: int) -> tuple[WeightSpan, ...]:
    """Return which weights sampled which steps: one span where all are the same, else one for each turn.

    steps: T of the fragment. Raises ValueError where no token was sampled.
    """
    sampled = {(turn.version, turn.update) for column in columns for turn in column.turns}
    if not sampled:
        raise ValueError("columns: none has a sampled token, so their weights are not known")
    if len(sampled) == 1:
        ((version, update),) = sampled
        return (WeightSpan(0, 0, steps, version, update),)
    return tuple(
        WeightSpan(slot, turn.start - 1, len(turn.log_prob), turn.version, turn.update)
        for slot, column in enumerate(columns)
        for turn in column.turns
    )


@dataclass(frozen=True, slots=True)
class Sampled:
    """A sampled answer. ids: its tokens. log_prob: of each. version, update: of the weights."""

    ids: tuple[int, ...]
    log_prob: tuple[float, ...]
    version: int
    update: int


class LiveConversation:
    """A conversation that continues, for one thread.

    most_tokens: of a column. most_lag: updates that a column may span; None: any number.
    """

    def __init__(self, encoder: ChatEncoder, *, most_tokens: int, most_lag: int | None = None) -> None:
        self._encoder, self._most_tokens, self._most_lag = encoder, most_tokens, most_lag
        self._ids: tuple[int, ...] = ()
        self._messages: tuple[Message, ...] = ()
        self._tools: Tools = ()
        self._turns: list[SampledTurn] = []
        self.prompt: tuple[int, ...] = ()
        """Ids of the prompt that `ask` has returned last; () once the conversation has ended."""
        self.asked: tuple[Message, ...] = ()
        """Messages of that prompt."""
        self._first_turn = 0
        self._done: list[tuple[int, Column]] = []
        """Finished columns, each with the number of its first turn."""
        self._rewarded: set[int] = set()
        """Turns of the open column with a reward."""
        self.cuts: Counter[str] = Counter()
        """Number of columns that were cut, by reason."""
        self.cut = ""
        """Why the newest prompt does not continue the column before it; "": it does, or there was none."""

    @property
    def turns(self) -> int:
        return self._first_turn + len(self._turns)

    def ask(
        self, messages: Sequence[Message], *, answer_tokens: int, update: int, tools: Tools = ()
    ) -> tuple[int, ...]:
        """Return the ids of the prompt that ends where the next answer begins.

        messages: all messages of the caller's conversation. answer_tokens: most tokens of the answer. update:
        number of the update that made the weights that will answer. Raises ValueError for a prompt that does
        not fit, and for messages that make no prompt; the conversation then stays as it was.
        """
        asked = tuple(messages)
        prompt = self._continued(asked, tools)
        why = self._why_cut(prompt, answer_tokens, update)
        if prompt is None or why:
            prompt = tuple(self._encoder.begin(asked, tools))
            if len(prompt) + answer_tokens > self._most_tokens:
                raise ValueError(
                    f"messages: {len(prompt)} tokens and an answer of up to {answer_tokens} do not fit into "
                    f"{self._most_tokens}; send fewer messages or a smaller max_tokens"
                )
            if why:
                self.cuts[why] += 1
            self.end(terminated=False)
        self.prompt, self.asked, self._tools, self.cut = prompt, asked, tools, why
        return prompt

    def answer(self, sampled: Sampled, message: Message) -> int:
        """Take the answer to the newest prompt and return its turn, from 0. message: as its caller got it.

        Raises ValueError where no token was sampled.
        """
        if not sampled.ids:
            raise ValueError("answer: no token was sampled")
        self._turns.append(
            SampledTurn(
                start=len(self.prompt),
                log_prob=sampled.log_prob,
                version=sampled.version,
                update=sampled.update,
            )
        )
        self._ids = (*self.prompt, *sampled.ids)
        self._messages = (*self.asked, message)
        return self.turns - 1

    def reward(self, amount: float, turn: int | None = None) -> bool:
        """Add to the reward of a turn, None: the newest; return False where its column was taken already.

        Raises ValueError for a turn that does not exist.
        """
        number = self.turns - 1 if turn is None else turn
        if not 0 <= number < self.turns:
            raise ValueError(f"turn={number}: the conversation has {self.turns} so far")
        if number >= self._first_turn:
            self._turns = _rewarded(self._turns, number - self._first_turn, amount)
            self._rewarded.add(number)
            return True
        for place, (first, column) in enumerate(self._done):
            if first <= number < first + len(column.turns):
                turns = tuple(_rewarded(column.turns, number - first, amount))
                self._done[place] = first, replace(column, turns=turns)
                return True
        return False

    def is_open(self, turn: int) -> bool:
        first = self._done[0][0] if self._done else self._first_turn
        return first <= turn < self.turns

    def give_up(self) -> int:
        """End it without the turns after the last reward, whose outcome is not known.

        Returns the number of sampled tokens that were left out.
        """
        kept = max(self._rewarded, default=self._first_turn - 1) + 1 - self._first_turn
        left_out = sum(len(turn.log_prob) for turn in self._turns[kept:])
        self._turns = self._turns[:kept]
        if self._turns:
            self._ids = self._ids[: self._turns[-1].end]
        self.end(terminated=False)
        return left_out

    @property
    def over(self) -> int:
        return len(self._done)

    @property
    def held_tokens(self) -> int:
        """Return the number of held tokens; one that is in a prompt and a column counts twice."""
        return len(self._ids) + len(self.prompt) + sum(len(column.ids) for _, column in self._done)

    def take(self, most: int | None = None) -> list[Column]:
        """Remove and return finished columns, the oldest first. most: their number; None: all."""
        count = len(self._done) if most is None else most
        done, self._done = self._done[:count], self._done[count:]
        return [column for _, column in done]

    def _continued(self, asked: tuple[Message, ...], tools: Tools) -> tuple[int, ...] | None:
        """Return the held ids with the new messages behind them; None where they cannot be continued."""
        count = len(self._messages)
        if not self._turns or asked[:count] != self._messages or len(asked) == count or tools != self._tools:
            return None
        try:
            *before, answer = self._messages
            said = answer.content
            new = self._encoder.follow(before, self._ids[-1], asked[count:], tools, said=said)
        except NotContinued:
            return None
        return (*self._ids, *new) if new else None

    def _why_cut(self, prompt: tuple[int, ...] | None, answer_tokens: int, update: int) -> str:
        if not self._turns:
            return ""
        if prompt is None:
            return "history"
        if len(prompt) + answer_tokens > self._most_tokens:
            return "length"
        oldest = min(turn.update for turn in self._turns)
        return "age" if self._most_lag is not None and update - oldest > self._most_lag else ""

    def end(self, *, terminated: bool = True) -> None:
        """End the open column. terminated: the conversation is over; False: its outcome is not known."""
        if self._turns:
            column = Column(ids=self._ids, turns=tuple(self._turns), terminated=terminated)
            self._done.append((self._first_turn, column))
        self._first_turn += len(self._turns)
        self._turns, self._ids, self._messages = [], (), ()
        self.prompt, self.asked, self._tools = (), (), ()
        self._rewarded.clear()


def _rewarded(turns: Sequence[SampledTurn], index: int, amount: float) -> list[SampledTurn]:
    changed = list(turns)
    changed[index] = replace(changed[index], reward=changed[index].reward + amount)
    return changed


# ---- Columns as fragments of a run: each column is an episode, numbered within its slot.


class ColumnFragments:
    """Makes fragments of N columns and numbers the episodes of each slot."""

    def __init__(
        self, schema: FragmentSchema, slots: int, pad_id: int, reward: LearnerReward | None = None
    ) -> None:
        """Raise ConfigurationError for a schema with tensors that no column has."""
        self._schema, self._pad, self._reward = schema, pad_id, reward
        self._episodes = Episodes(slots)
        unknown = sorted(schema.by_name.keys() - column_tensors([Column(ids=(pad_id,))], pad_id).keys())
        if unknown:
            raise ConfigurationError(
                f"schema: tensors {unknown} are not made by a generator of language models"
            )

    def restart(self, slots: int) -> None:
        self._episodes = Episodes(slots)

    def cut(
        self, columns: Sequence[Column], fields: HeaderFields, attributes: bytes = b"", first_slot: int = 0
    ) -> tuple[Fragment, list[Episode]]:
        """Return the fragment of one column per slot, and its episodes with their unshaped rewards.

        fields: their weights are those of the episodes, and of a fragment without sampled tokens. first_slot:
        slot of the first column; the weights of one slot never get older.
        """
        tensors = column_tensors(columns, self._pad)
        slots = tuple(one._replace(slot_id=first_slot + one.slot_id) for one in self._episodes.slots())
        ends = Ends(tensors["final/slot"], tensors["final/step"])
        episodes = self._episodes.advance(
            tensors["reward"], tensors["valid"], tensors["terminated"], ends, fields.weights.version
        )
        if self._reward is not None:
            tensors["reward"] = self._reward(tensors)
        steps = len(tensors["reward"])
        header = fields.header(self._schema, steps, slots, attributes)
        if any(column.turns for column in columns):
            header = replace(header, weights=weight_spans(columns, steps))
        return make(header, tensors), [replace(one, slot_id=first_slot + one.slot_id) for one in episodes]


class ColumnGenerator(acting.Generator):
    """Base of generators that make a batch of columns at a time, one for each slot, with a local policy."""

    def __init__(self, of: Run, local: LocalPolicy, pad_id: int, health: Health) -> None:
        super().__init__(of, health)  # after the model is loaded, because it watches the time of steps
        self.local = local
        reward = learner_reward(of.environment)
        self._fragments = ColumnFragments(of.specification.schema, self.slots, pad_id, reward)
        self._made: tuple[Sequence[Column], bytes] | None = None

    def restart(self, seed: int, seeds: list[int]) -> None:
        self._fragments.restart(self.slots)
        self.draw_from(seed, seeds[0])

    @abstractmethod
    def draw_from(self, seed: int, asked: int) -> None:
        """Begin a session. seed: of the sampled tokens. asked: seed of the order of prompts."""

    def unroll(self, is_over: Callable[[], bool]) -> None:
        self._made = self.columns(is_over)
        self.health.progress(GENERATING)

    @abstractmethod
    def columns(self, is_over: Callable[[], bool]) -> tuple[Sequence[Column], bytes]:
        """Generate a batch; return its columns and the attributes of its fragment."""

    def cut_with(self, fields: HeaderFields) -> tuple[Fragment, list[Episode]]:
        assert self._made is not None, "unroll comes before cut"
        columns, attributes = self._made
        return self._fragments.cut(columns, fields, attributes)
