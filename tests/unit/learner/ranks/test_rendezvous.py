"""What a process is told of the ranks that it is one of."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined] # public, by its documentation

from penstock.config import settings as configuration
from penstock.config.settings import ConfigurationError
from penstock.learner.ranks.roles import RankPlace, _agreed, meet, place_of


def test_without_torchrun_there_is_one_rank() -> None:
    assert place_of({}) == place_of({"RANK": "0", "WORLD_SIZE": "1"}) == RankPlace()


def test_torchrun_says_which_rank_this_is_and_how_many_share_the_machine() -> None:
    place = place_of({"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"})
    assert place == RankPlace(rank=2, size=4, on_host=0, size_on_host=2)
    assert place.spans_machines
    assert not RankPlace(rank=1, size=2, on_host=1, size_on_host=2).spans_machines


def test_ranks_on_several_machines_need_permission_to_speak_in_plaintext() -> None:
    place = RankPlace(rank=0, size=2)
    with pytest.raises(ConfigurationError, match=r"learner\.plaintext_ranks=false.*unencrypted"):
        meet(place, configuration.load([{"run": "a"}]), torch.device("cpu"))


def test_ranks_that_are_started_again_do_not_read_what_dead_ones_have_left() -> None:
    store = HashStore()
    places = [RankPlace(rank=rank, size=3) for rank in (1, 2, 0)]
    for attempt in (b"first", b"second"):
        with ThreadPoolExecutor(3) as pool:
            met = list(pool.map(lambda place: _agreed(store, place, 30.0), places))
        assert not any(part.check(["word"]) for part in met)
        met[0].set("word", attempt.decode())
        assert [part.get("word") for part in met] == [attempt] * 3
