from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined] # public, by its documentation

from penstock.config import settings as configuration
from penstock.config.settings import ConfigurationError
from penstock.learner.algorithms.rows import RankGroup
from penstock.learner.ranks.roles import RankPlace, _agreed, divide, meet, place_of
from tests.support.run.rank_updates import CASES, learn, run

RUNS = [
    *((2, name) for name in CASES if name != "poisoned"),
    *((3, name) for name in ("every-term", "batch-norm", "poisoned")),
]
"""Ranks, and what they learn."""
AS_ONE = [(size, name) for size, name in RUNS if name != "dropout"]
"""Those that draw nothing by rank."""
UPDATES = {2: 6, 3: 5}
"""By ranks."""


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folders = {size: tmp_path_factory.mktemp(f"ranks-{size}") for size, _ in RUNS}
    for size, folder in folders.items():
        names = [name for ranks, name in RUNS if ranks == size]
        run(size, folder, "tests.support.run.rank_updates", str(folder), str(UPDATES[size]), *names)
    return folders


@cache
def alone(name: str, updates: int) -> dict[str, Tensor]:
    return learn(name, updates, RankGroup(), 0)


@pytest.mark.promise("several-ranks-agree-fragments")
@pytest.mark.parametrize(("size", "name"), AS_ONE)
def test_several_ranks_give_the_result_of_one(several: dict[int, Path], size: int, name: str) -> None:
    found, expected = load_file(several[size] / f"{name}-0.safetensors"), alone(name, UPDATES[size])
    torch.testing.assert_close(found["gradient"], expected["gradient"], rtol=0.0, atol=1e-10)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-6, atol=1e-6, msg=key)


@pytest.mark.parametrize(("size", "name"), RUNS)
def test_all_ranks_are_the_same_bit_by_bit(several: dict[int, Path], size: int, name: str) -> None:
    first, *others = [load_file(several[size] / f"{name}-{rank}.safetensors") for rank in range(size)]
    for other in others:
        assert all(torch.equal(first[key], other[key]) for key in first)


@pytest.mark.promise("several-ranks-agree-fragments")
def test_ranks_agree_on_the_fragments_that_make_an_update_fail(several: dict[int, Path]) -> None:
    wanted = [10 * update + place for update in range(UPDATES[3]) if update != 3 for place in (1, 4)]
    assert load_file(several[3] / "poisoned-0.safetensors")["culprits"].tolist() == wanted


def parts(charges: list[int], ranks: int) -> list[list[int]]:
    return [charges[part] for part in divide(charges, ranks)]


def test_equal_fragments_are_divided_evenly_and_fewer_than_ranks_leave_some_without() -> None:
    assert parts([8, 8, 8, 8], 2) == [[8, 8], [8, 8]]
    assert parts([8, 8, 8], 3) == [[8], [8], [8]]
    assert parts([1, 1, 1, 3], 2) == [[1, 1, 1], [3]]
    assert sorted(map(len, parts([8], 3))) == [0, 0, 1]
    assert parts([], 2) == [[], []]


@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(1, 8))
def test_every_fragment_goes_to_one_rank(charges: list[int], ranks: int) -> None:
    divided = parts(charges, ranks)
    assert [charge for part in divided for charge in part] == charges
    assert len(divided) == ranks
    largest = max(charges, default=0)
    if sum(charges):
        assert all(sum(part) <= sum(charges) / ranks + largest for part in divided)


def test_the_rank_and_the_ranks_of_the_machine_come_from_torchrun() -> None:
    assert place_of({}) == place_of({"RANK": "0", "WORLD_SIZE": "1"}) == RankPlace()
    place = place_of({"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"})
    assert place == RankPlace(rank=2, size=4, on_host=0, size_on_host=2)
    assert place.spans_machines
    assert not RankPlace(rank=1, size=2, on_host=1, size_on_host=2).spans_machines


def test_ranks_on_several_machines_need_permission_for_plaintext() -> None:
    place = RankPlace(rank=0, size=2)
    with pytest.raises(ConfigurationError, match=r"learner\.plaintext_ranks=false.*unencrypted"):
        meet(place, configuration.load([{"run": "a"}]), torch.device("cpu"))


def test_restarted_ranks_do_not_read_leftovers_of_dead_ones() -> None:
    store = HashStore()
    places = [RankPlace(rank=rank, size=3) for rank in (1, 2, 0)]
    for attempt in (b"first", b"second"):
        with ThreadPoolExecutor(3) as pool:
            met = list(pool.map(lambda place: _agreed(store, place, 30.0), places))
        assert not any(part.check(["word"]) for part in met)
        met[0].set("word", attempt.decode())
        assert [part.get("word") for part in met] == [attempt] * 3
