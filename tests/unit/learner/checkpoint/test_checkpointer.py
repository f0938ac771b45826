"""How much of the log lies there that a checkpoint could let go."""

from penstock.learner.checkpoint.checkpointer import _Consumed


def test_bytes_are_known_at_the_ends_of_deliveries() -> None:
    consumed = _Consumed(trim=0, position=0, size=0)
    for last, size in ((4, 40), (8, 80), (9, 5)):
        consumed.add(last, size)
    assert [consumed.through(number) for number in (0, 3, 4, 7, 8, 9, 99)] == [0, 0, 40, 40, 120, 125, 125]


def test_what_lies_before_the_trim_is_forgotten() -> None:
    consumed = _Consumed(trim=0, position=0, size=0)
    for last in range(1, 1001):
        consumed.add(last, 10)
    consumed.forget_before(900)
    assert consumed.through(950) - consumed.through(900) == 500
    assert len(consumed._ends) == 101


def test_a_resumed_learner_takes_all_of_the_log_for_what_it_has_consumed() -> None:
    consumed = _Consumed(trim=10, position=30, size=500)
    assert [consumed.through(number) for number in (10, 20, 30)] == [0, 0, 500]
