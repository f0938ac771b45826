"""What an Append is refused for before it is parsed."""

import pytest

from broker.outline import LARGEST_BYTES, LARGEST_CALL_BYTES, Unfit, check_outline
from penstock.v1 import experience_pb2 as experience
from penstock.v1 import fragment_pb2
from penstock.wire import fragment as fragments
from penstock.wire.limits import (
    MAX_EPISODES_PER_REPORT,
    MAX_FRAGMENTS_PER_APPEND,
    MAX_NUMBER,
    MAX_ROWS_PER_APPEND,
    MAX_SLOTS,
    MAX_TENSORS,
)
from tests.small_run import fragment


def _append(*given: fragment_pb2.Fragment) -> bytes:
    return experience.AppendRequest(session=1, fragments=given).SerializeToString()


def _header(**rows: int) -> fragment_pb2.Fragment:
    message = fragment_pb2.Fragment()
    for name, count in rows.items():
        for _ in range(count):
            getattr(message.header, name).add()
    return message


def test_an_honest_append_passes() -> None:
    """As many fragments as one message may hold."""
    message = fragments.to_proto(fragment(1))
    check_outline("Append", _append(*[message] * MAX_FRAGMENTS_PER_APPEND))


def test_the_widest_honest_fragment_passes() -> None:
    """Every slot that there may be, each with a span of its own, its numbers as large as they get."""
    message = fragment_pb2.Fragment()
    for slot in range(MAX_SLOTS):
        message.header.slots.add(slot_id=slot, episode_id=MAX_NUMBER, first_step=MAX_NUMBER)
        message.header.weights.add(slot=slot, start=4095, length=1, version=MAX_NUMBER, update=MAX_NUMBER)
    check_outline("Append", _append(message))


def test_the_largest_report_passes() -> None:
    """Its numbers as large as they get."""
    episode = experience.Episode(
        slot_id=4095, episode_id=2**64 - 1, episode_return=-1e300, length=2**64 - 1, version=2**64 - 1
    )
    report = experience.ReportEpisodesRequest(
        session=MAX_NUMBER, sequence=MAX_NUMBER, episodes=[episode] * MAX_EPISODES_PER_REPORT
    )
    check_outline("ReportEpisodes", report.SerializeToString())


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x1a\x00" * (MAX_FRAGMENTS_PER_APPEND + 1), "fragments: more"),
        (_append(_header(slots=MAX_SLOTS + 1)), "header.slots: more than 4096"),
        (_append(_header(weights=MAX_SLOTS + 1)), "header.weights: more than 4096"),
        (_append(_header(slots=2000, tensors=MAX_TENSORS + 1)), "header.tensors: more than 64"),
        (_append(*[_header(slots=MAX_SLOTS)] * (MAX_ROWS_PER_APPEND // MAX_SLOTS + 1)), "slots, spans"),
        (
            _append(fragment_pb2.Fragment(header={"tensors": [{"shape": [1] * 3000}]})),
            "header.tensors: a row of",
        ),
        (b"\x1a\x05\x0a", "cut off"),
        (b"\x1a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "more than 10 bytes"),
        (b"\x1b\x1c", "no field begins"),
        (b"\x08", "cut off"),
        (b"\x0d\x00", "cut off"),
    ],
)
def test_what_would_unfold_to_much_or_is_cut_off_is_unfit(data: bytes, why: str) -> None:
    """With the field and its bound."""
    with pytest.raises(Unfit, match=why):
        check_outline("Append", data)


@pytest.mark.parametrize("name", ["Append", "ReportEpisodes", "WatchLatest", "Pause", "Check"])
def test_every_rpc_has_a_largest_request(name: str) -> None:
    """The largest is of no more use to others than to whom it is for."""
    largest = LARGEST_BYTES.get(name, LARGEST_CALL_BYTES)
    check_outline(name, b"\x08\x01" * (largest // 2))
    with pytest.raises(Unfit, match=f"{largest + 2} bytes, at most {largest}"):
        check_outline(name, b"\x08\x01" * (largest // 2 + 1))
