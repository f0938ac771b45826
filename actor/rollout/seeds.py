"""Seeds of a session, different for every actor, session and slot, and the place of an actor.

Two runs with the same settings have the same seeds.
"""

import re
import zlib

import numpy as np

from penstock.policy.acting.drawing import ExplorationSlots

_ACTIONS = 2**32
"""In place of a slot: the stream that actions are drawn from."""


def environment_seeds(run_seed: int, actor_id: str, salt: int, slots: int) -> list[int]:
    """Return one seed per slot, each below 2^32 (what every Gymnasium environment takes).

    run_seed: of the run. actor_id, salt: of the session. slots: how many seeds.
    """
    return [_draw(run_seed, actor_id, salt, slot) for slot in range(slots)]


def action_seed(run_seed: int, actor_id: str, salt: int) -> int:
    """Return the seed of the actions drawn in a session.

    run_seed: of the run. actor_id, salt: of the session.
    """
    return _draw(run_seed, actor_id, salt, _ACTIONS)


def place_of(actor_id: str, actors: int, slots: int) -> ExplorationSlots:
    """Return which environments of the run an actor has, of `actors` with `slots` each.

    By the number that its id ends with (`actor-3`), else by a hash of the id; actors beyond `actors` share
    places.
    """
    number = re.search(r"\d+$", actor_id)
    index = int(number[0]) if number else zlib.crc32(actor_id.encode())
    count = max(1, actors)
    return ExplorationSlots(first=index % count * slots, of=count * slots)


def _draw(run_seed: int, actor_id: str, salt: int, slot: int) -> int:
    entropy = [run_seed, zlib.crc32(actor_id.encode()), salt, slot]
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])
