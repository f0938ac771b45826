"""The learner's books: every number once, and a lineage that can be followed."""

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.broker.log.replies import Totals
from penstock.learner.ledger import Drop, Ledger, Origin, append_lineage, ranges


def test_trained_and_dropped_add_up_to_the_position() -> None:
    ledger = Ledger()
    ledger.book(3, trained=(1, 3), dropped={2: Drop.STALE}, steps=24)
    ledger.book(5, trained=(), dropped={4: Drop.NAN, 5: Drop.STALE}, steps=16)
    assert ledger.totals() == Totals(trained=2, dropped={"stale": 2, "nan": 1}, env_steps=40)
    assert ledger.position == 5


@pytest.mark.parametrize(
    ("trained", "dropped"),
    [((1, 3), {}), ((1, 2, 3), {3: Drop.NAN}), ((1, 1, 2), {}), ((2, 3, 4), {}), ((), {})],
)
def test_a_number_that_is_missing_doubled_or_foreign_is_an_error(
    trained: tuple[int, ...], dropped: dict[int, Drop]
) -> None:
    with pytest.raises(RuntimeError, match=r"entries 1\.\.3"):
        Ledger().book(3, trained=trained, dropped=dropped, steps=0)


def test_books_balance_only_when_three_counts_agree() -> None:
    ledger = Ledger(10, Totals(trained=9, dropped={"stale": 1}))
    assert ledger.balance(acked=15, lost=2, resident=3).balanced
    assert ledger.balance(acked=15, lost=2, resident=3).dropped == {"stale": 1, "log_lost": 2}
    assert not ledger.balance(acked=15, lost=2, resident=4).balanced


def test_each_checkpoint_adds_its_own_range_to_the_lineage(tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.book(4, trained=(1, 4), dropped={2: Drop.STALE, 3: Drop.STALE}, steps=8)
    append_lineage(tmp_path / "lineage.jsonl", ledger.entry("one", ""))
    ledger.book(6, trained=(5, 6), dropped={}, steps=8)
    append_lineage(tmp_path / "lineage.jsonl", ledger.entry("two", "one"))
    first, second = map(json.loads, (tmp_path / "lineage.jsonl").read_text().splitlines())
    assert (first["first"], first["last"], first["exceptions"]) == (1, 4, {"stale": [[2, 3]]})
    assert (second["parent"], second["first"], second["last"]) == ("one", 5, 6)
    assert second["exceptions"] == {}


def test_a_torn_line_of_a_crash_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = tmp_path / "lineage.jsonl"
    path.write_text('{"checkpoint": "o')
    append_lineage(path, Ledger().entry("two", "one"))
    assert json.loads(path.read_text().splitlines()[1])["checkpoint"] == "two"


@given(st.sets(st.integers(1, 60)))
def test_ranges_name_exactly_the_numbers(numbers: set[int]) -> None:
    found = ranges(list(numbers))
    assert {n for first, last in found for n in range(first, last + 1)} == numbers
    assert all(after[0] > before[1] + 1 for before, after in itertools.pairwise(found))


def test_a_line_names_who_sent_what_was_trained_and_what_was_left_out(tmp_path: Path) -> None:
    ledger = Ledger()
    origins = {
        1: Origin(7, 1, b"11111111"),
        2: Origin(8, 1, b"22222222"),
        3: Origin(7, 2, b"33333333"),
        4: Origin(7, 3),
    }
    dropped = {4: Drop.STALE, 5: Drop.LOG_LOST}
    ledger.book(5, trained=(3, 1, 2), dropped=dropped, steps=24, origins=origins)
    append_lineage(tmp_path / "lineage.jsonl", ledger.entry("one", "", version=4))
    line = json.loads((tmp_path / "lineage.jsonl").read_text())
    assert line["sessions"] == {"7": [[1, 2]], "8": [[1, 1]]}
    assert line["left_out"] == {"stale": {"7": [[3, 3]]}}
    assert line["digests"]["7"] == (b"11111111" + b"33333333").hex()
    assert line["version"] == 4
    assert ledger.entry("two", "one").sessions == {}
