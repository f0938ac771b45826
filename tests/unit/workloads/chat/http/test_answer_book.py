"""The book of answers: counts by version, and what it holds after it was opened again."""

from pathlib import Path

from workloads.chat.http.answer_book import INPUT, AnswerBook, VersionCounts, hashed


def test_conversations_are_counted_once_and_outlive_the_book(tmp_path: Path) -> None:
    """A conversation that two versions answered counts for both."""
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
    """It is an answer; a conversation with no other turn is none by which a version is judged."""
    book = AnswerBook(tmp_path / "made")
    for conversation, turn in (("a", 0), ("b", 0), ("b", 1)):
        book.note(conversation, turn, 3, fallback=False)
    for _ in range(2):
        book.note_asked("a", 0)
        book.note_asked("b", 1)
    (found,) = book.counts()
    assert (found.conversations, found.answers, found.asked) == (1, 3, 2)


def test_a_conversation_without_an_answer_is_none(tmp_path: Path) -> None:
    """A message that was blocked is counted as blocked, and neither as an answer nor for a day or person."""
    book = AnswerBook(tmp_path / "made")
    book.note("a", 0, 3, fallback=False, blocked=f"{INPUT}rule", person="ann")
    book.note("b", 0, 3, fallback=False, person="bob")
    book.note("b", 1, 3, fallback=False, blocked=f"{INPUT}rule", person="bob")
    book.note("c", 0, 3, fallback=False, blocked="output", person="cid")
    (found,) = book.counts()
    assert (found.conversations, found.answers, found.blocked) == (2, 2, 3)
    days, people = book.spread([], 9)
    assert sum(one.conversations for one in days) == 2
    assert {one.name for one in people} == {hashed("bob"), hashed("cid")}


def test_it_is_its_users_alone(tmp_path: Path) -> None:
    """The folder that it makes is its user's alone."""
    AnswerBook(tmp_path / "made")
    assert (tmp_path / "made").stat().st_mode & 0o077 == 0
