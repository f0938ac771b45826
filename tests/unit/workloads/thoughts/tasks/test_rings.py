"""Rings: what is asked, what follows from a thought, and what one pass can know."""

import math

import numpy as np
import pytest

from penstock.workloads.thoughts.tasks import Rings


def accuracy_without_thoughts(symbols: int, hops: int, *, forward: int, backward: int = 0) -> float:
    """The best accuracy of one who follows so many hops in one pass.

    symbols: n of the ring. hops: k that are asked. forward, backward: hops that can be followed.
    """
    if hops <= forward or symbols - hops <= backward:
        return 1.0
    return 1.0 / (symbols - 1 - forward - backward)


def test_a_question_shows_the_ring_that_its_answer_lies_on() -> None:
    task, random = Rings(7, 4), np.random.default_rng(3)
    for level in task.levels:
        one = task.example(random, level)
        edges = dict(edge.split(">") for edge in one.question[:7])
        assert sorted(edges) == sorted(edges.values()) == list(task.symbols)
        here, way = one.question[7], []
        for _ in range(level):
            here = edges[here]
            way.append(here)
        assert (*one.steps, *one.answer) == tuple(way)
        assert one.question[8] == f"k{level}"
        assert {*one.question, *one.answer} <= set(task.words)


def test_equal_rings_have_one_identity_whatever_is_asked_of_them() -> None:
    task, random = Rings(4, 2), np.random.default_rng(0)
    assert len({task.example(random, 2).identity for _ in range(300)}) == math.factorial(3)


def test_a_wrong_step_is_followed_from_where_it_leads() -> None:
    task = Rings(4, 2)
    question = ("a>b", "b>c", "c>d", "d>a", "a", "k2")
    right = task.resume(question, ())
    assert right is not None
    assert (right.steps, right.answer) == (("b",), ("c",))
    wrong = task.resume(question, ("d",))
    assert wrong is not None
    assert (wrong.steps, wrong.answer) == ((), ("a",))
    assert task.resume(question, ("b", "c")) is None
    assert task.resume(question, ("a>b",)) is None


@pytest.mark.parametrize(
    ("hops", "forward", "backward", "accuracy"),
    [(6, 0, 0, 1 / 10), (6, 1, 0, 1 / 9), (6, 2, 2, 1 / 6), (6, 3, 3, 1 / 4), (6, 6, 0, 1.0), (6, 0, 5, 1.0)],
)
def test_the_ceiling_without_thoughts_is_known(
    hops: int, forward: int, backward: int, accuracy: float
) -> None:
    found = accuracy_without_thoughts(11, hops, forward=forward, backward=backward)
    assert found == pytest.approx(accuracy)


def test_the_ceiling_is_that_of_who_knows_the_hops() -> None:
    task, random, hits = Rings(7, 3), np.random.default_rng(1), 0
    for _ in range(4000):
        one = task.example(random, 3)
        edges = dict(edge.split(">") for edge in one.question[:7])
        back = {end: begin for begin, end in edges.items()}
        start = one.question[7]
        seen = {start, edges[start], edges[edges[start]], back[start], back[back[start]]}
        left = [symbol for symbol in task.symbols if symbol not in seen]
        hits += left[random.integers(len(left))] == one.answer[0]
    assert hits / 4000 == pytest.approx(accuracy_without_thoughts(7, 3, forward=2, backward=2), abs=0.04)


@pytest.mark.parametrize(
    ("symbols", "hops", "named"), [(3, 2, "4 to 26"), (27, 2, "4 to 26"), (7, 6, "2 to 5")]
)
def test_a_ring_that_cannot_be_is_refused(symbols: int, hops: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Rings(symbols, hops)
