"""Seeds are equal in equal runs and differ between actors, sessions and slots."""

import pytest

from penstock.actor.rollout.generator import action_seed, environment_seeds, place_of
from penstock.policy.acting.drawing import ExplorationSlots


def test_equal_runs_draw_equal_seeds() -> None:
    assert environment_seeds(3, "actor-0", 0, 4) == environment_seeds(3, "actor-0", 0, 4)
    assert action_seed(3, "actor-0", 0) == action_seed(3, "actor-0", 0)


def test_every_slot_of_every_session_has_seeds_of_its_own() -> None:
    seeds = [
        seed
        for run in (0, 2**62)
        for actor in ("actor-0", "actor-1")
        for salt in (0, 1, 2**20)
        for seed in [*environment_seeds(run, actor, salt, 16), action_seed(run, actor, salt)]
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**32 for seed in seeds)


@pytest.mark.parametrize(
    ("actor_id", "actors", "first"),
    [("actor-0", 3, 0), ("actor-2", 3, 16), ("host-7-actor-4", 3, 8), ("actor-9", 0, 0)],
)
def test_the_place_of_an_actor_is_the_number_that_its_id_ends_with(
    actor_id: str, actors: int, first: int
) -> None:
    assert place_of(actor_id, actors, 8) == ExplorationSlots(first=first, of=8 * max(1, actors))


def test_an_id_without_a_number_has_a_place_too() -> None:
    place = place_of("penstock-actor-x7k", 4, 8)
    assert place == place_of("penstock-actor-x7k", 4, 8)
    assert place.first in (0, 8, 16, 24)
