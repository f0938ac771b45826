"""Where in which episodes a fragment's experience begins.

This distinguishes two fragments of one experience.
"""

from typing import Final

from penstock.protocol.fragment import Fragment
from penstock.protocol.payload import read_entry

_VALID: Final = "valid"

Beginning = tuple[int, int, int]
"""Slot, episode, index of the first step in it."""


def beginnings(fragment: Fragment) -> tuple[Beginning, ...]:
    """Return one beginning for each slot with a valid step.

    A slot whose steps only reset its environment is left out: the fragment after it begins at the same step.
    Raises ValueError when the payload does not hold what the table describes.
    """
    named = tuple((slot.slot_id, slot.episode_id, slot.first_step) for slot in fragment.header.slots)
    entry = next((entry for entry in fragment.header.tensors if entry.name == _VALID), None)
    if entry is None:
        return named
    valid = read_entry(entry, fragment.payload)
    return tuple(name for column, name in enumerate(named) if valid[:, column].any())
