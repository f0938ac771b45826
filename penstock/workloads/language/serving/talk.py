"""One conversation of a client: what was answered last, which of it is gone on with, and what it earns.

An answer (sibling) that is not gone on with is not learned from. One that was not sampled from the policy is
context of what follows, and no turn of its column.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from penstock.workloads.language.conversation import LiveConversation, Sampled
from penstock.workloads.language.prompt import Message
from penstock.workloads.language.serving.asks import (
    ID_BYTES,
    SAMPLED_BYTES,
    TURN_BYTES,
    Ask,
    TextReply,
    of_answer,
    of_ask,
    of_message,
)
from penstock.workloads.plugin.serving import Episode

Unlearned = Callable[[str, int], None]
"""Takes why sampled tokens are not learned from, and how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sibling:
    """An answer that may be gone on with. unlearned: why it is not learned from; "": it is.

    penalty: reward that it has as soon as it is a turn.
    """

    sampled: Sampled
    message: Message
    ended: bool
    unlearned: str = ""
    penalty: float = 0.0


@dataclass(slots=True, eq=False)
class Talk:
    """Used by one event loop. episode: its id, owner, arm and rewards. busy: held while it is answered."""

    episode: Episode
    live: LiveConversation
    on_unlearned: Unlearned
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)
    is_keeping: bool = False
    """Late rewards are being kept: no column of it is sent meanwhile."""
    counted_bytes: int = 0
    """Of `held_bytes`, so many are counted among those of all conversations."""
    ripening: int = 0
    """Columns that are over and wait for late rewards."""
    _turns: list[int | None] = field(default_factory=list)
    """By turn: which it is in the columns; None: it is in none."""
    _asked: tuple[Message, ...] = ()
    _prompt: tuple[int, ...] = ()
    siblings: list[Sibling] = field(default_factory=list)
    """Answers to what was asked last."""
    _last: tuple[Ask, TextReply] | None = None
    _asked_bytes: int = 0
    _last_bytes: int = 0
    _has_ended: bool = False
    """Whether the newest turn ended by itself."""

    @property
    def name(self) -> str:
        """Return its id without the part that proves it was given."""
        return self.episode.id.rpartition("-")[0]

    @property
    def turns(self) -> int:
        """Turns so far, that of the newest answers among them."""
        return len(self._turns) + bool(self.siblings)

    @property
    def next_turn(self) -> int:
        """Number of the turn that answers what is asked next, or once more."""
        return len(self._turns)

    @property
    def held_bytes(self) -> int:
        """What it takes in memory, about."""
        size = ID_BYTES * (len(self._prompt) + self.live.held_tokens) + TURN_BYTES * self.live.turns
        for one in self.siblings:
            size += SAMPLED_BYTES * len(one.sampled.ids) + of_message(one.message)
        if self._last is not None:
            answers = self._last[1].answers
            size += sum(of_answer(one) for one in answers)
            if self._last[0].messages is not self._asked:
                size += self._last_bytes
        return size + self._asked_bytes

    def repeated(self, ask: Ask) -> TextReply | None:
        """What was answered to this very request; None where it is another, or wants another answer."""
        if self._last is None or ask.regenerate or self._last[0] != _what(ask):
            return None
        return self._last[1]

    def prompt_for(self, ask: Ask, most: int, update: int) -> tuple[int, ...]:
        """Ids that the answers to these messages begin behind; raises ValueError, see `LiveConversation.ask`.

        most: tokens of an answer. update: of the weights that will answer.
        """
        if self.siblings and ask.messages == self._asked:
            return self._prompt
        self.choose(ask.messages)
        self._prompt = self.live.ask(ask.messages, answer_tokens=most, update=update, tools=ask.tools)
        self._asked, self._asked_bytes = ask.messages, of_ask(ask)
        return self._prompt

    def answered(self, ask: Ask, reply: TextReply, siblings: Sequence[Sibling]) -> None:
        """These were answered to it."""
        self.siblings.extend(siblings)
        self._last, self._last_bytes = (_what(ask), reply), of_ask(ask)

    def choose(self, messages: tuple[Message, ...] = ()) -> None:
        """Make the sibling a turn that these messages go on with; the first where they do not say."""
        siblings, self.siblings = self.siblings, []
        if not siblings:
            return
        count = len(self._asked)
        follows = messages[count] if messages[:count] == self._asked and len(messages) > count else None
        said = [one.message for one in siblings]
        chosen = siblings[said.index(follows) if follows in said else 0]
        for one in siblings:
            if one is not chosen:
                self.on_unlearned("sibling", len(one.sampled.ids))
        if chosen.unlearned:
            self.on_unlearned(chosen.unlearned, len(chosen.sampled.ids))
            self._turns.append(None)
        else:
            self._turns.append(self.live.answer(chosen.sampled, chosen.message))
            if chosen.penalty:
                self.reward(len(self._turns) - 1, chosen.penalty)
        self._has_ended = chosen.ended

    # ---- rewards

    def place_of(self, turn: int | None) -> int:
        """The number of a turn, None: the newest, which is then gone on with; raises ValueError."""
        self.choose()
        number = len(self._turns) - 1 if turn is None else turn
        if not 0 <= number < len(self._turns):
            raise ValueError(f"turn={number}: the conversation has {len(self._turns)} so far")
        return number

    def is_late(self, turn: int) -> bool:
        """Whether the turn was sent to the learner."""
        index = self._turns[turn]
        return index is not None and not self.live.is_open(index)

    def reward(self, turn: int, amount: float) -> None:
        """Add to what a turn earned."""
        index = self._turns[turn]
        if index is not None:
            self.live.reward(amount, index)
        self.episode.add_reward(turn, amount)

    # ---- the end

    def end(self, *, terminated: bool) -> None:
        """It is over; where its last answer was cut short it is truncated in any case."""
        self.choose()
        self.live.end(terminated=terminated and self._has_ended)
        self._let_go()

    def give_up(self) -> None:
        """Give the conversation up: what is behind the last reward is not learned from."""
        self.choose()
        if left_out := self.live.give_up():
            self.on_unlearned("abandoned", left_out)
        self._let_go()

    def _let_go(self) -> None:
        """Nothing is asked or repeated any more; what is over may wait for late rewards still."""
        self._asked, self._prompt, self._last = (), (), None
        self._asked_bytes = self._last_bytes = 0


def _what(ask: Ask) -> Ask:
    return replace(ask, request_id="", regenerate=False)
