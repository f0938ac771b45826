"""Seeds are equal in equal runs and differ between actors, sessions and slots."""

from actor.seeds import action_seed, environment_seeds


def test_equal_runs_draw_equal_seeds() -> None:
    """Nothing but the arguments enters."""
    assert environment_seeds(3, "actor-0", 0, 4) == environment_seeds(3, "actor-0", 0, 4)
    assert action_seed(3, "actor-0", 0) == action_seed(3, "actor-0", 0)


def test_every_slot_of_every_session_has_seeds_of_its_own() -> None:
    """Two runs, two actors, three sessions, sixteen slots and the actions."""
    seeds = [
        seed
        for run in (0, 2**62)
        for actor in ("actor-0", "actor-1")
        for salt in (0, 1, 2**20)
        for seed in [*environment_seeds(run, actor, salt, 16), action_seed(run, actor, salt)]
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**32 for seed in seeds)
