"""The book of answers: counts by version, and what it holds after it was opened again."""

from pathlib import Path

from penstock.registry.ratings import RatedConversation
from penstock.workloads.chat.http.chat_api import INPUT, AnswerBook, TalkCounts, VersionCounts

DAY_S = 86_400.0
FIRST_S = 20_000 * DAY_S  # 2024-10-04


def rated(conversation: str, rater: str, *, well: bool = True) -> RatedConversation:
    """What somebody's newest thumb says."""
    return RatedConversation(conversation=conversation, rater=rater, is_well=well)


def counted(
    book: AnswerBook, *given: RatedConversation, days: int = 30, people: int = 20
) -> list[TalkCounts]:
    """The rows of days and people."""
    return book.by_day_and_person(given, most_days=days, most_people=people)


def test_conversations_are_counted_once_and_outlive_the_book(tmp_path: Path) -> None:
    book = AnswerBook(tmp_path / "made")
    book.note("a", 0, 3, fallback=False)
    book.note("a", 1, 3, fallback=False, blocked="output")
    book.note("a", 2, 4, fallback=False)
    book.note("b", 0, 0, fallback=True)
    again = AnswerBook(tmp_path / "made")
    assert again.counts() == [
        VersionCounts(version=4, conversations=1, answers=1, fallbacks=0, blocked=0),
        VersionCounts(version=3, conversations=1, answers=2, fallbacks=0, blocked=1),
        VersionCounts(version=0, conversations=1, answers=1, fallbacks=1, blocked=0),
    ]
    assert again.blocked() == {"output": 1}


def test_a_turn_that_somebody_was_asked_about_is_no_part_of_a_conversation(tmp_path: Path) -> None:
    book = AnswerBook(tmp_path / "made")
    for conversation, turn in (("a", 0), ("b", 0), ("b", 1)):
        book.note(conversation, turn, 3, fallback=False)
    for _ in range(2):
        book.note_asked("a", 0)
        book.note_asked("b", 1)
    (found,) = book.counts()
    assert (found.conversations, found.answers, found.asked) == (1, 3, 2)


def test_a_conversation_without_an_answer_is_none(tmp_path: Path) -> None:
    book = AnswerBook(tmp_path / "made")
    book.note("a", 0, 3, fallback=False, blocked=f"{INPUT}rule", person="ann")
    book.note("b", 0, 3, fallback=False, person="bob")
    book.note("b", 1, 3, fallback=False, blocked=f"{INPUT}rule", person="bob")
    book.note("c", 0, 3, fallback=False, blocked="output", person="cid")
    (version,) = book.counts()
    assert (version.conversations, version.answers, version.blocked) == (2, 2, 3)
    found = counted(book, rated("a", "ann"), rated("b", "bob"), rated("c", "cid"))
    assert sum(one.conversations for one in found if one.by == "day") == 2
    assert [one.name for one in found if one.by == "person"] == ["bob", "cid"]


def test_a_conversation_is_of_the_day_and_of_the_person_that_began_it(tmp_path: Path) -> None:
    book = AnswerBook(tmp_path)
    for name, person, at_s in (
        ("a", "ann", FIRST_S),
        ("b", "bob", FIRST_S + DAY_S - 1),
        ("b", "bob", FIRST_S + DAY_S + 1),
        ("c", "ann", FIRST_S + DAY_S),
        ("d", "ann", FIRST_S),
        ("e", "eve", FIRST_S),
    ):
        book.note(name, 0, 3, fallback=False, person=person, at_s=at_s)
    given = (rated("a", "ann"), rated("c", "ann", well=False), rated("e", "eve"))
    found = counted(book, *given)
    assert found == [
        TalkCounts(by="day", name="2024-10-05", conversations=1, rated=1, well=0),
        TalkCounts(by="day", name="2024-10-04", conversations=4, rated=2, well=2),
        TalkCounts(by="person", name="ann", conversations=3, rated=2, well=1),
        TalkCounts(by="person", name="eve", conversations=1, rated=1, well=1),
    ]
    assert counted(book, *given, days=1, people=1) == [found[0], found[2]]


def test_what_somebody_was_asked_about_and_what_is_not_in_the_book_count_for_nobody(tmp_path: Path) -> None:
    book = AnswerBook(tmp_path)
    book.note("asked", 0, 3, fallback=False, person="ann")
    book.note_asked("asked", 0)
    book.note("nameless", 0, 3, fallback=False)
    book.note("of-bob", 0, 3, fallback=False, person="bob")
    given = (rated("nameless", "", well=False), rated("of-bob", "bob"))
    found = counted(book, *given, rated("asked", "ann"), rated("elsewhere", "eve"))
    assert [(one.by, one.conversations, one.rated, one.well) for one in found] == [
        ("day", 2, 2, 1),
        ("person", 1, 1, 1),
    ]


def test_who_is_forgotten_is_gone_from_every_count(tmp_path: Path) -> None:
    book = AnswerBook(tmp_path)
    for name, person in (("a", "ann"), ("b", "ann"), ("c", "bob")):
        book.note(name, 0, 3, fallback=True, blocked="output", person=person)
    book.note_asked("b", 0)
    book.forget("ann")
    book.forget("nobody")
    found = counted(book, rated("a", "ann"), rated("c", "bob"))
    assert [(one.by, one.conversations) for one in found] == [("day", 1), ("person", 1)]
    (version,) = book.counts()
    assert (version.conversations, version.answers, version.asked) == (1, 1, 0)
    assert b"ann" not in (tmp_path / "chat.sqlite").read_bytes()


def test_it_is_its_users_alone(tmp_path: Path) -> None:
    AnswerBook(tmp_path / "made")
    assert (tmp_path / "made").stat().st_mode & 0o077 == 0
