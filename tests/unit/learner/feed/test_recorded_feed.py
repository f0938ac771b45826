"""What the loop is given from a recording, and in what order."""

import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config.settings import CloneSection, PolicySection, PPOSection
from penstock.learner.algorithms.algorithm import Imitator
from penstock.learner.algorithms.clone import Clone
from penstock.learner.algorithms.ppo import PPO
from penstock.learner.batch import Batch
from penstock.learner.feed.log_feed import LogBatch
from penstock.learner.feed.recorded_feed import FeedEnded, RecordedFeed, Recording
from penstock.learner.feed.recording import RecordingWriter
from penstock.policy.policy import build
from penstock.protocol.spaces import Discrete
from tests.support.run.small_run import CHARGE, OBSERVATION, specification
from tests.unit.learner.feed.recorded import LARGE, batch, numbered, write


def feed(folder: Path, algorithm: Any, *, taken: int = 0, seed: int = 0) -> RecordedFeed:
    """Not started."""
    return RecordedFeed(
        Recording(folder), algorithm, seed=seed, device=torch.device("cpu"), prefetch=2, taken=taken,
        stop=threading.Event(),
    )  # fmt: skip


def everything(of: RecordedFeed) -> list[LogBatch]:
    """All deliveries, as the loop takes them."""
    thread = threading.Thread(target=of.run, daemon=True)
    thread.start()
    found = []
    while True:
        try:
            log_batch = of.take(10.0)
        except FeedEnded:
            break
        if log_batch is not None:
            found.append(log_batch)
    thread.join(10.0)
    return found


def numbers(batch_: Batch | None) -> list[int]:
    """Which fragments a batch is of, by their reward."""
    assert batch_ is not None
    return [int(reward) for reward in batch_.reward[0, ::2]]


def policy() -> Any:
    """Of the smallest run."""
    return build(OBSERVATION, Discrete(2), PolicySection(hidden_sizes=(4,)), 0)


def ppo(**section: Any) -> PPO:
    """Two fragments make a batch."""
    return PPO(policy(), PPOSection(batch_steps=2 * CHARGE, **section), seed=0)


def clone(**section: Any) -> Clone:
    """Two fragments make a batch."""
    return Clone(policy(), CloneSection(batch_steps=2 * CHARGE, **section), seed=0)


@pytest.fixture
def learnt(tmp_path: Path) -> Path:
    """Of a learner: batches of one to three fragments, and one of nothing."""
    batches: Sequence[tuple[int, Sequence[int]]] = [(3, (2, 1, 3)), (4, ()), (5, (5,)), (7, (6, 7))]
    write(tmp_path / "a", [batch(last, of, of_round=index) for index, (last, of) in enumerate(batches)])
    return tmp_path / "a"


@pytest.fixture
def played(tmp_path: Path) -> Path:
    """Of a policy: 21 fragments in no batch."""
    writer = RecordingWriter.begin(tmp_path / "b", specification(), "policy", LARGE)
    for sequence in range(1, 22):
        writer.fragment(numbered(sequence))
    writer.close()
    return tmp_path / "b"


def test_a_learners_batches_come_as_they_were_consumed(learnt: Path) -> None:
    found = everything(feed(learnt, ppo()))
    assert [numbers(one.batch) for one in found] == [[2, 1, 3], [5], [6, 7]]
    assert [one.reward for one in found] == [6.0 * CHARGE, 5.0 * CHARGE, 13.0 * CHARGE]
    assert [one.steps for one in found] == [3 * CHARGE, CHARGE, 2 * CHARGE]
    assert all((one.last, one.trained, one.dropped, one.size) == (0, (), {}, 0) for one in found)
    assert [one.round for one in found] == [None] * 3
    lock_step = everything(feed(learnt, ppo(staleness=0)))
    assert [one.round for one in lock_step] == [0, 2, 3]


def test_fragments_without_batches_are_taken_as_the_algorithm_likes(played: Path) -> None:
    found = everything(feed(played, ppo()))
    assert [numbers(one.batch) for one in found] == [[n, n + 1] for n in range(1, 20, 2)] + [[21]]


def test_an_imitator_reads_every_fragment_in_every_pass_and_never_what_it_validates_on(played: Path) -> None:
    algorithm = clone(passes=3, validation=0.2)
    assert isinstance(algorithm, Imitator)
    of = feed(played, algorithm)
    of.hold_out()
    held = set(numbers(algorithm._held_out))
    assert len(held) == 4
    order = [number for one in everything(of) for number in numbers(one.batch)]
    assert Counter(order) == dict.fromkeys(set(range(1, 22)) - held, 3)
    passes = [order[start : start + 17] for start in (0, 17, 34)]
    assert len({tuple(one) for one in passes}) == 3
    again = feed(played, clone(passes=3, validation=0.2))
    again.hold_out()
    assert [number for one in everything(again) for number in numbers(one.batch)] == order
    other = feed(played, clone(passes=3, validation=0.2), seed=1)
    other.hold_out()
    assert [number for one in everything(other) for number in numbers(one.batch)] != order


def test_without_validation_nothing_is_held_out(played: Path) -> None:
    algorithm = clone(passes=1, validation=0.0)
    of = feed(played, algorithm)
    of.hold_out()
    assert algorithm._held_out is None
    assert sorted(n for one in everything(of) for n in numbers(one.batch)) == list(range(1, 22))


@pytest.mark.parametrize("taken", [1, 4])
def test_a_resumed_learner_goes_on_behind_what_it_has_taken(played: Path, taken: int) -> None:
    whole = [numbers(one.batch) for one in everything(feed(played, clone(passes=2, validation=0.0)))]
    rest = everything(feed(played, clone(passes=2, validation=0.0), taken=taken))
    assert [numbers(one.batch) for one in rest] == whole[taken:]
    assert rest[-1].recorded == len(whole)
