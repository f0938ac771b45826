"""The grammar of a trace context, and that the broker's check holds a header to it."""

from dataclasses import replace

import pytest

from penstock.wire.fragment import check
from penstock.wire.traceparent import TraceParent, read_traceparent
from tests.support.run.small_run import RUN, SCHEMA, fragment

GOOD = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

WRONG = {
    "empty": "",
    "words": "not a trace",
    "short ids": "00-ab-cd-01",
    "upper case": GOOD.upper(),
    "no trace": f"00-{0:032x}-00f067aa0ba902b7-01",
    "no span": f"00-4bf92f3577b34da6a3ce929d0e0e4736-{0:016x}-01",
    "another version": "01" + GOOD[2:],
    "no version": "ff" + GOOD[2:],
    "more behind": GOOD + "-aa",
    "a line break": GOOD + "\n",
    "other digits": GOOD.replace("4", "٤"),
    "ten thousand characters": "0" * 10_000,
}


def test_what_is_read_is_written_the_same() -> None:
    """Ids as numbers; of the flags only whether it is sampled."""
    read = read_traceparent(GOOD)
    assert read == TraceParent(0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7, sampled=True)
    assert str(read) == GOOD
    assert not read_traceparent(GOOD[:-2] + "02").sampled
    assert read_traceparent(GOOD[:-2] + "03").sampled


@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG.keys())
def test_what_is_no_trace_context_is_refused_by_name(text: str) -> None:
    """With no more of the value than a line holds."""
    with pytest.raises(ValueError, match=r"header\.traceparent=.*write 00-TRACE-SPAN-FLAGS") as caught:
        read_traceparent(text)
    assert len(str(caught.value)) < 300


def test_a_header_is_checked_before_it_is_stored() -> None:
    """None is as good as a good one."""
    given = fragment(1)
    for traceparent in ("", GOOD):
        check(replace(given, header=replace(given.header, traceparent=traceparent)), SCHEMA, RUN)
    bad = replace(given, header=replace(given.header, traceparent=GOOD[:-1]))
    with pytest.raises(ValueError, match=r"header\.traceparent"):
        check(bad, SCHEMA, RUN)
