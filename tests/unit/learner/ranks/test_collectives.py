"""Several ranks make the updates that one rank makes; real processes, gloo."""

from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from penstock.learner.algorithms.rows import RankGroup
from tests.support.run.ranks import run
from tests.unit.learner.ranks.updates import CASES, learn

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
    """Where two and three ranks have left what they learned."""
    folders = {size: tmp_path_factory.mktemp(f"ranks-{size}") for size, _ in RUNS}
    for size, folder in folders.items():
        names = [name for ranks, name in RUNS if ranks == size]
        run(size, folder, "tests.unit.learner.ranks.updates", str(folder), str(UPDATES[size]), *names)
    return folders


@cache
def alone(name: str, updates: int) -> dict[str, Tensor]:
    """What one rank learns."""
    return learn(name, updates, RankGroup(), 0)


@pytest.mark.promise("several-ranks-agree-fragments")
@pytest.mark.parametrize(("size", "name"), AS_ONE)
def test_several_ranks_equal_one(several: dict[int, Path], size: int, name: str) -> None:
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
