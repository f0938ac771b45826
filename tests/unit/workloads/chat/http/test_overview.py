"""The overview: a row for each version, judged by all its conversations."""

from penstock.registry.ratings import Tally
from penstock.workloads.chat.http.chat_api import VersionCounts
from penstock.workloads.chat.http.chat_routes import shown_name, versions_of


def _counts(version: int, conversations: int) -> VersionCounts:
    return VersionCounts(
        version=version, conversations=conversations, answers=2 * conversations, fallbacks=0, blocked=1
    )


def test_satisfaction_is_over_all_conversations() -> None:
    newest, older = versions_of(
        [_counts(8, 40), _counts(7, 29)],
        [Tally(version=7, rated=29, well=29), Tally(version=8, rated=10, well=10)],
        None,
    )
    assert (newest["version"], newest["satisfaction"], newest["ratingRate"]) == (8, 0.25, 0.25)
    assert newest["low"] < 0.25 < newest["high"]
    assert (older["satisfaction"], older["low"], older["blocked"]) == (None, None, 1)


def test_a_browsers_own_name_is_shown_in_part() -> None:
    assert shown_name("0123456789abcdef") == "012345…"
    assert shown_name("user/7") == "user/7"
    assert shown_name("token/3/0123456789abcdef") == "token/3/012345…"
