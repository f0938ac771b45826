"""When an actor gives up: three bad sessions in a row, and at once when fenced."""

import pytest

from penstock.actor.link.session import count_strikes
from penstock.protocol.refusal import Reason, Refusal
from penstock.runtime.exit import Fatal

INVALID = Refusal(reason=Reason.INVALID, detail="reward: holds NaN")


def test_the_third_bad_session_in_a_row_is_fatal_and_names_the_cause() -> None:
    strikes = count_strikes(0, INVALID, acknowledged=False)
    strikes = count_strikes(strikes, Refusal(reason=Reason.GAP), acknowledged=False)
    with pytest.raises(Fatal, match="3 sessions.*holds NaN"):
        count_strikes(strikes, INVALID, acknowledged=False)


def test_an_acknowledgement_between_starts_the_count_again() -> None:
    assert count_strikes(2, INVALID, acknowledged=True) == 1


def test_an_expired_session_does_not_count() -> None:
    assert count_strikes(2, Refusal(reason=Reason.EXPIRED), acknowledged=False) == 2


def test_being_fenced_is_fatal_at_once() -> None:
    with pytest.raises(Fatal, match="another process"):
        count_strikes(0, Refusal(reason=Reason.FENCED), acknowledged=True)
