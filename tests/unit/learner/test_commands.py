"""What checkpoints remember of commands: none is done twice, none is forgotten."""

from dataclasses import replace

from penstock.broker.log.replies import Answer, Command
from penstock.learner.commands import CommandRecord


def command(number: int, answer: Answer | None = None) -> Command:
    """A restore with an id of its own."""
    request_id = f"id-{number}"
    return Command(number=number, request_id=request_id, action="restore", argument="good", answer=answer)


def done(number: int) -> Answer:
    """What was done, before the checkpoint that contains it has an id."""
    return Answer(number=number, request_id=f"id-{number}", detail="done")


def test_what_was_done_is_not_wanted_again() -> None:
    record = CommandRecord()
    assert record.is_wanted(command(1))
    record.note_done(done(1))
    assert not record.is_wanted(command(1))
    (answer,) = record.uncommitted("c1")
    assert answer == replace(done(1), checkpoint_id="c1")
    state = record.state()
    record.committed("c1")
    assert record.uncommitted("c2") == ()
    for known in (record, CommandRecord.from_state(state, "c1")):
        assert not known.is_wanted(command(1))
        assert known.newest == 1


def test_what_a_lost_checkpoint_contained_is_done_again() -> None:
    record = CommandRecord.from_state({"newest": 1, "answers": []}, "c1")
    assert record.is_wanted(command(2, done(2)))
    assert not record.is_wanted(command(1, done(1)))
    assert not record.is_wanted(command(2, replace(done(2), refusal=1))), "what was refused was not done"


def test_an_answer_that_redis_lost_is_given_again_under_the_number_of_now() -> None:
    record = CommandRecord()
    record.note_done(done(1))
    assert record.known(command(1)) is None
    record.committed("c1")
    again = replace(command(7), request_id="id-1")
    assert record.known(again) == replace(done(1), number=7, checkpoint_id="c1")
    assert not record.is_wanted(again)
    assert record.known(command(1, done(1))) is None, "Redis has the answer"


def test_answers_are_bounded() -> None:
    record = CommandRecord()
    for number in range(1, 40):
        record.note_done(done(number))
        record.committed(f"c{number}")
    assert len(record.state()["answers"]) == 16
    assert record.newest == 39
