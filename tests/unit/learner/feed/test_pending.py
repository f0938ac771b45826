"""How a batch is chosen: each entry is judged once, and again only where a verdict may have changed."""

from dataclasses import dataclass, field

from penstock.broker.log.replies import LogEntry
from penstock.learner.feed.log_feed import Pending
from tests.support.run.small_run import SLOTS, STEPS, fragment

CHARGE = STEPS * SLOTS


def entry(number: int, round_: int = 0) -> LogEntry:
    """An entry of one small fragment."""
    header = fragment(1, number).header
    return LogEntry(number=number, header=header, steps_total=number * CHARGE, size=1, round=round_)


@dataclass
class Stand:
    """Pending entries, the verdict on them, and how often each question was asked."""

    batch: int
    turn: int = 0
    refused: set[int] = field(default_factory=set)
    judged: list[int] = field(default_factory=list)
    asked: int = 0

    def __post_init__(self) -> None:
        """Make the entries."""
        self.pending = Pending(self.judge, lambda: (self.turn, frozenset(self.refused)))

    def judge(self, one: LogEntry) -> bool:
        """Note the question; whether the entry is kept."""
        self.judged.append(one.number)
        return one.number not in self.refused

    def makes_batch(self, fragments: int, charge: int) -> bool:
        """Count the question; whether there are enough."""
        assert charge == fragments * CHARGE
        self.asked += 1
        return fragments >= self.batch

    def choose(self) -> list[int] | None:
        """Return the numbers of a batch, or None where there is none yet."""
        full = self.pending.choose(self.makes_batch)
        return [one.number for one in self.pending.kept] if full else None


def test_each_of_many_entries_that_arrive_alone_is_judged_once() -> None:
    stand = Stand(batch=400)
    chosen = None
    for number in range(1, 401):
        assert chosen is None
        stand.pending.add(entry(number))
        chosen = stand.choose()
    assert chosen == list(range(1, 401))
    assert stand.judged == list(range(1, 401))
    assert stand.asked <= 3 * 400


def test_entries_behind_a_batch_are_not_judged_before_their_turn() -> None:
    stand = Stand(batch=2)
    for number in range(1, 6):
        stand.pending.add(entry(number))
    assert stand.choose() == [1, 2]
    assert stand.judged == [1, 2]
    stand.pending.take()
    assert stand.choose() == [3, 4]
    stand.pending.take()
    assert stand.choose() is None
    assert stand.pending.kept


def test_kept_entries_are_judged_again_where_a_verdict_may_be_another_one() -> None:
    stand = Stand(batch=3)
    for number in (1, 2):
        stand.pending.add(entry(number))
    assert stand.choose() is None
    stand.refused = {1}
    for number in (3, 4):
        stand.pending.add(entry(number))
    assert stand.choose() == [2, 3, 4]
    assert stand.judged == [1, 2, 1, 2, 3, 4]
    stand.turn = 1
    assert stand.choose() == [2, 3, 4]
    assert stand.judged[-3:] == [2, 3, 4]


def test_what_is_discarded_makes_room_for_those_behind() -> None:
    stand = Stand(batch=2)
    for number in (1, 2, 3):
        stand.pending.add(entry(number))
    assert stand.choose() == [1, 2]
    stand.pending.discard({2})
    assert stand.choose() == [1, 3]


def test_a_round_takes_what_is_of_it_and_leaves_later_ones() -> None:
    stand = Stand(batch=9)
    for number, round_ in ((1, 4), (2, 5), (3, 4), (4, 5)):
        stand.pending.add(entry(number, round_))
    assert [one.number for one in stand.pending.choose_round(4)] == [1, 3]
    stand.pending.take()
    assert [one.number for one in stand.pending.choose_round(5)] == [2, 4]


def test_nothing_behind_the_last_entry_of_a_flush_is_kept() -> None:
    stand = Stand(batch=4)
    for number in (1, 2, 3):
        stand.pending.add(entry(number))
    assert stand.choose() is None
    assert not stand.pending.choose(stand.makes_batch, through=2)
    assert [one.number for one in stand.pending.kept] == [1, 2]
    assert stand.pending.charge == 2 * CHARGE
    stand.pending.take()
    for number in (4, 5, 6):
        stand.pending.add(entry(number))
    assert stand.choose() == [3, 4, 5, 6]


def test_whole_batches_before_the_last_entry_of_a_flush_are_chosen_as_ever() -> None:
    stand = Stand(batch=2)
    for number in (1, 2, 3, 4):
        stand.pending.add(entry(number))
    assert stand.pending.choose(stand.makes_batch, through=3)
    assert [one.number for one in stand.pending.kept] == [1, 2]
    stand.pending.take()
    assert not stand.pending.choose(stand.makes_batch, through=3)
    assert [one.number for one in stand.pending.kept] == [3]
