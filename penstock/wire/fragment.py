"""Fragment: T steps of N slots as one unit of transport, storage and accounting.

`build` packs arrays, `check` holds a fragment against the run's schema, `arrays` gives zero-copy views,
`to_proto` and `from_proto` cross the wire. The broker reads header and table and of the payload
no more than `check_content` says. The parts lie beside this file: `header`,
`header_codec`, `payload`, `conformance`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from penstock.v1 import fragment_pb2 as pb
from penstock.wire import conformance
from penstock.wire.header import FragmentHeader, Kind, Slot, TensorEntry, WeightSpan
from penstock.wire.header_codec import header_bytes, header_from_proto, header_to_proto, parse_header
from penstock.wire.payload import pack, read_payload
from penstock.wire.schema import FragmentSchema
from penstock.wire.tensor import Array

__all__ = [
    "Fragment",
    "FragmentHeader",
    "Kind",
    "Slot",
    "TensorEntry",
    "WeightSpan",
    "build",
    "check",
    "from_proto",
    "header_bytes",
    "header_from_proto",
    "header_to_proto",
    "parse_header",
    "read_payload",
    "to_proto",
]


@dataclass(frozen=True, slots=True)
class Fragment:
    """Header and payload."""

    header: FragmentHeader
    payload: bytes | memoryview

    def arrays(self) -> dict[str, Array]:
        """Every tensor by name: read-only views of the payload, decoded copies where compressed.

        Raises ValueError when the payload does not hold what the table describes.
        """
        return read_payload(self.header, self.payload)


def build(header: FragmentHeader, tensors: Mapping[str, Array], compress: Collection[str] = ()) -> Fragment:
    """Pack arrays behind one another; names in `compress` are stored as lz4 frames.

    header: with any `tensors`; they are replaced by the table of what is packed.
    """
    entries, payload = pack(tensors, compress)
    return Fragment(replace(header, tensors=entries), payload)


def check(fragment: Fragment, schema: FragmentSchema, run: str) -> None:
    """Raise ValueError that names field, value and remedy unless the fragment follows the schema."""
    conformance.check(fragment.header, fragment.payload, schema, run)


def to_proto(fragment: Fragment) -> pb.Fragment:
    """The message of a fragment."""
    return pb.Fragment(header=header_to_proto(fragment.header), payload=bytes(fragment.payload))


class Message(Protocol):
    """A `pb.Fragment`, or what stands for one whose payload was not parsed (`penstock.wire.append`)."""

    @property
    def header(self) -> pb.FragmentHeader:
        """Its header."""

    @property
    def payload(self) -> bytes | memoryview:
        """Its payload."""


def from_proto(message: Message) -> Fragment:
    """The fragment of a message, unchecked but for its header's kind and counts."""
    return Fragment(header_from_proto(message.header), message.payload)
