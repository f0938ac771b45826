"""Fragment: T steps of N slots as one unit of transport, storage and accounting."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final

from penstock.protocol import conformance
from penstock.protocol.header import (
    FragmentHeader,
    Kind,
    Slot,
    TensorEntry,
    WeightSpan,
    header_bytes,
    header_from_proto,
    header_to_proto,
    pack,
    parse_header,
    read_entry,
    read_payload,
)
from penstock.protocol.schema import FragmentSchema
from penstock.protocol.tensor import Array

__all__ = [
    "Fragment",
    "FragmentHeader",
    "Kind",
    "Slot",
    "TensorEntry",
    "WeightSpan",
    "build",
    "check",
    "header_bytes",
    "header_from_proto",
    "header_to_proto",
    "parse_header",
    "read_payload",
]


@dataclass(frozen=True, slots=True)
class Fragment:
    """Header and payload."""

    header: FragmentHeader
    payload: bytes | memoryview

    def arrays(self) -> dict[str, Array]:
        """Return every tensor by name, in the shape and dtype of the table."""
        return read_payload(self.header, self.payload)


def build(header: FragmentHeader, tensors: Mapping[str, Array], compress: Collection[str] = ()) -> Fragment:
    """Pack arrays behind one another; names in `compress` are stored as lz4 frames."""
    entries, payload = pack(tensors, compress)
    return Fragment(replace(header, tensors=entries), payload)


def check(fragment: Fragment, schema: FragmentSchema, run: str) -> None:
    """Raise ValueError that names field, value and remedy unless the fragment follows the schema."""
    conformance.check(fragment.header, fragment.payload, schema, run)


# ---- Where in which episodes a fragment's experience begins.

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
