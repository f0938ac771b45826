"""Fragments as the messages of the protocol; the services read and write their bytes without these."""

from penstock.protocol.append import SentFragment
from penstock.protocol.fragment import Fragment, header_bytes, header_from_proto
from penstock.v1 import fragment_pb2 as pb


def to_proto(fragment: Fragment) -> pb.Fragment:
    """Return the message of a fragment."""
    return pb.Fragment(
        header=pb.FragmentHeader.FromString(header_bytes(fragment.header)), payload=bytes(fragment.payload)
    )


def from_proto(message: pb.Fragment) -> Fragment:
    """Return the fragment of a message; raises ValueError as `header_from_proto` does."""
    return Fragment(header_from_proto(message.header), message.payload)


def sent(fragment: Fragment) -> SentFragment:
    """Return a fragment as the broker finds it in a request."""
    return SentFragment(
        pb.FragmentHeader.FromString(header_bytes(fragment.header)), memoryview(fragment.payload)
    )
