"""Satisfaction over time and over people: over all conversations, and told only where there are enough."""

from pathlib import Path

from penstock.registry.ratings import RatedConversation
from workloads.chat.http.answer_book import AnswerBook, TalkCounts, hashed
from workloads.chat.http.satisfaction_spread import over_people, shown_name

DAY_S = 86_400.0
FIRST_S = 20_000 * DAY_S  # 2024-10-04


def rated(conversation: str, rater: str, *, well: bool = True) -> RatedConversation:
    """What somebody's newest thumb says."""
    return RatedConversation(conversation=conversation, rater=rater, is_well=well)


def test_a_conversation_is_of_the_day_and_of_the_person_that_began_it(tmp_path: Path) -> None:
    """Without a thumb it counts as one that was not liked; past midnight it stays where it began."""
    book = AnswerBook(tmp_path)
    for name, person, at_s in (
        ("a", "ann", FIRST_S),
        ("b", "bob", FIRST_S + DAY_S - 1),
        ("b", "bob", FIRST_S + DAY_S + 1),
        ("c", "ann", FIRST_S + DAY_S),
    ):
        book.note(name, 0, 3, fallback=False, person=person, at_s=at_s)
    days, people = book.spread([rated("a", "ann"), rated("c", "ann", well=False)], 30)
    assert days == [
        TalkCounts(name="2024-10-05", conversations=1, rated=1, well=0),
        TalkCounts(name="2024-10-04", conversations=2, rated=1, well=1),
    ]
    assert people == [
        TalkCounts(name=hashed("ann"), conversations=2, rated=2, well=1),
        TalkCounts(name=hashed("bob"), conversations=1, rated=0, well=0),
    ]
    assert book.spread([], 1)[0] == [TalkCounts(name="2024-10-05", conversations=1, rated=0, well=0)]


def test_what_somebody_was_asked_about_and_what_is_not_in_the_book_count_for_nobody(tmp_path: Path) -> None:
    """Of a book from before people were noted, those who rated are known by their ratings."""
    book = AnswerBook(tmp_path)
    book.note("asked", 0, 3, fallback=False, person="ann")
    book.note_asked("asked", 0)
    book.note("early", 0, 3, fallback=False)
    book.note("unrated", 0, 3, fallback=False)
    days, people = book.spread([rated("early", "bob"), rated("asked", "ann"), rated("elsewhere", "eve")], 30)
    assert [(one.conversations, one.rated, one.well) for one in days] == [(2, 1, 1)]
    assert people == [TalkCounts(name=hashed("bob"), conversations=1, rated=1, well=1)]


def test_who_is_forgotten_is_gone_from_every_count(tmp_path: Path) -> None:
    """With the conversations that they did not rate; others stay."""
    book = AnswerBook(tmp_path)
    for name, person in (("a", "ann"), ("b", "ann"), ("c", "bob")):
        book.note(name, 0, 3, fallback=True, blocked="output", person=person)
    book.note_asked("b", 0)
    book.forget("ann")
    book.forget("nobody")
    days, people = book.spread([], 30)
    assert [one.conversations for one in days] == [1]
    assert [one.name for one in people] == [hashed("bob")]
    (version,) = book.counts()
    assert (version.conversations, version.answers, version.asked) == (1, 1, 0)
    assert b"ann" not in (tmp_path / "chat.sqlite").read_bytes()


def person(conversations: int, well: int) -> TalkCounts:
    """Somebody with so many conversations, so many of which they liked."""
    return TalkCounts(name="x", conversations=conversations, rated=well, well=well)


def test_people_are_held_against_the_share_of_all() -> None:
    """Each person counts once, with an interval; who is as content as all is on neither side."""
    people = [person(3, 1)] * 20 + [person(1, 0)] * 15 + [person(2, 2)] * 5
    found = over_people(people)
    assert (found["talked"], found["everRated"]) == (40, 25)
    assert found["satisfaction"] == 30 / 85
    assert (found["below"]["share"], found["above"]["share"]) == (35 / 40, 5 / 40)
    assert found["below"]["low"] < 35 / 40 < found["below"]["high"]
    alike = over_people([person(2, 1)] * 30)
    assert (alike["below"]["share"], alike["above"]["share"]) == (0.0, 0.0)


def test_of_few_people_one_cannot_tell() -> None:
    """Neither how they are spread, nor, below as many conversations, what the share of all is."""
    found = over_people([person(2, 1), person(1, 1)] * 14)
    assert (found["talked"], found["below"]["share"], found["above"]["high"]) == (28, None, None)
    assert found["satisfaction"] == 28 / 42
    assert over_people([person(2, 1)])["satisfaction"] is None
    assert over_people([])["talked"] == 0


def test_a_browsers_own_name_is_shown_in_part() -> None:
    """Whoever has all of it reads what its person said; the name of an account opens nothing."""
    assert shown_name("0123456789abcdef") == "012345…"
    assert shown_name("user/7") == "user/7"
    assert shown_name("token/3/0123456789abcdef") == "token/3/012345…"
