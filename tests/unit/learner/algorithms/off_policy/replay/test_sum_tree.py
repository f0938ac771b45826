"""The sum tree against the list it stands for."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.learner.algorithms.off_policy.memory import SumTree

CPU = torch.device("cpu")
PRIORITIES = st.floats(min_value=0.0, max_value=1e6, allow_nan=False)


class Naive:
    """A list and a loop."""

    def __init__(self, capacity: int) -> None:
        self.priorities = [0.0] * capacity

    def find(self, mass: float) -> int:
        """The first leaf at whose end more than `mass` is behind."""
        last = 0
        for index, priority in enumerate(self.priorities):
            if priority > 0 and mass < priority:
                return index
            mass -= priority
            last = index if priority > 0 else last
        return last


@given(st.data())
def test_every_history_agrees_with_a_list(data: st.DataObject) -> None:
    capacity = data.draw(st.integers(1, 40))
    tree, naive = SumTree(capacity, CPU), Naive(capacity)
    for _ in range(data.draw(st.integers(1, 5))):
        changed = data.draw(st.dictionaries(st.integers(0, capacity - 1), st.integers(0, 100), min_size=1))
        for index, priority in changed.items():
            naive.priorities[index] = float(priority)
        tree.set(torch.tensor(list(changed)), torch.tensor(list(changed.values())))
        assert tree.get(torch.arange(capacity)).tolist() == naive.priorities
        total = sum(naive.priorities)
        assert tree.total.item() == total
        if total:
            # Whole priorities and halves have no rounding, so that both sides must agree exactly.
            masses = [half / 2 for half in range(int(2 * total))][:200]
            found = tree.find(torch.tensor(masses, dtype=torch.float64)).tolist()
            assert found == [naive.find(mass) for mass in masses]


@given(
    st.lists(PRIORITIES, min_size=1, max_size=60),
    st.lists(st.floats(0, 1.0000001), min_size=1, max_size=20),
)
def test_a_leaf_without_priority_is_never_found(priorities: list[float], shares: list[float]) -> None:
    if not any(priorities):
        return
    tree = SumTree(len(priorities), CPU)
    tree.set(torch.arange(len(priorities)), torch.tensor(priorities, dtype=torch.float64))
    found = tree.find(torch.tensor(shares, dtype=torch.float64) * tree.total)
    assert all(priorities[index] > 0 for index in found.tolist())


def test_the_total_stays_exact_over_many_changes() -> None:
    generator = np.random.default_rng(0)
    tree = SumTree(1000, CPU)
    priorities = np.zeros(1000)
    for _ in range(300):
        index = generator.choice(1000, 64, replace=False)
        priorities[index] = generator.random(64) * 10.0 ** generator.integers(-6, 6)
        tree.set(torch.from_numpy(index), torch.from_numpy(priorities[index]))
    fresh = SumTree(1000, CPU)
    fresh.set(torch.arange(1000), torch.from_numpy(priorities))
    assert tree.total.item() == fresh.total.item()
