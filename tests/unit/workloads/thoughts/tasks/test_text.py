"""Questions of real text: what is shown, what is asked for, and what is held out."""

import numpy as np
import pytest

from penstock.config.settings import ConfigurationError
from penstock.workloads.thoughts.environment import Layout
from penstock.workloads.thoughts.tasks import RARE, Text, draw, draw_tests, is_held_out, open_task, reference

PASSAGES = [f"the {one} sat on the mat. it was the {one} of the house, and it sat." for one in ("cat", "dog")]


def test_a_question_is_a_place_in_a_passage() -> None:
    task = Text(["The Cat sat on the mat."], words=20, context=3, following=2)
    seen = {task.example(np.random.default_rng(seed), 1).question for seed in range(50)}
    assert seen == {("the", "cat", "sat"), ("cat", "sat", "on"), ("sat", "on", "the")}
    one = task.example(np.random.default_rng(0), 1)
    whole = task.resume(one.question, ())
    assert whole is not None
    assert (whole.steps, whole.answer) == ((), one.answer)
    assert task.resume(one.question, ("cat",)) is None
    assert task.resume(("no", "such", "place"), ()) is None


def test_no_question_has_two_answers_and_none_asks_for_a_rare_word() -> None:
    task = Text(["a b c d a b e", "a b c d f"], words=5, context=2, following=1)
    examples = [task.example(np.random.default_rng(seed), 1) for seed in range(200)]
    answers = {
        one.question: {other.answer for other in examples if other.question == one.question}
        for one in examples
    }
    assert all(len(given) == 1 for given in answers.values())
    assert all(RARE not in one.answer for one in examples)
    assert len(task.words) == len(set(task.words)) == 5


def test_several_places_of_a_passage_are_thought_about_one_behind_the_other() -> None:
    task = Text(["a b c d e f g h"], words=20, context=2, following=2, places=3)
    assert task.levels == (1, 2, 3)
    for level, shown in ((1, 2), (2, 4), (3, 6)):
        examples = [task.example(np.random.default_rng(seed), level) for seed in range(100)]
        letters = "abcdefgh"
        assert {("".join(one.question), "".join(one.answer)) for one in examples} == {
            (letters[start : start + shown], letters[start + shown : start + shown + 2])
            for start in range(8 - shown - 1)
        }
        assert {one.level for one in examples} == {level}
    tests = draw_tests(open_task("text:6:1:4"), 0, 8)
    assert [one.level for one in tests] == [1, 2, 3, 4] * 2
    assert [len(one.question) for one in tests] == [6, 7, 8, 9] * 2
    assert all(map(is_held_out, tests))


def test_places_can_be_chosen_by_what_stands_before_them() -> None:
    task = Text(["a b , c d , e f g"], words=20, context=3, following=1, behind=(",",))
    seen = {task.example(np.random.default_rng(seed), 1).question for seed in range(50)}
    assert seen == {("a", "b", ","), ("c", "d", ",")}
    with pytest.raises(ValueError, match="no passage has 3 words of which the last is one of ; and 1 known"):
        Text(["a b c d e"], words=20, context=3, following=1, behind=(";",))


def test_a_random_thought_is_text() -> None:
    task, random = Text(PASSAGES, words=30, context=3, following=1), np.random.default_rng(0)
    thoughts = [task.random_thought(random, 4) for _ in range(100)]
    assert {len(thought) for thought in thoughts} == {0, 1, 2, 3, 4}
    joined = [" ".join(passage) for passage in task._passages]
    assert all(any(" ".join(thought) in passage for passage in joined) for thought in thoughts)


def test_no_passage_is_both_trained_on_and_tested() -> None:
    names = [f"{one}{other}" for one in "abcdefghijklmnop" for other in "abcdefghijklmnop"]
    passages = [f"{name} goes there {name} comes back {name} stays" for name in names]
    task, random = Text(passages, words=400, context=3, following=1, places=2), np.random.default_rng(0)
    trained = {
        word for number in range(500) for word in draw(task, random, 1 + number % 2, held_out=False).question
    } & set(names)
    tested = {word for one in draw_tests(task, 0, 300) for word in one.question} & set(names)
    assert len(trained) > 100
    assert len(tested) > 5
    assert not trained & tested


def test_the_reference_of_python_is_a_task() -> None:
    task = open_task("text:8:2")
    assert Layout(task).vocabulary == len(task.words) + 8
    random = np.random.default_rng(0)
    trained = {draw(task, random, 1, held_out=False).identity for _ in range(300)}
    tested = {one.identity for one in draw_tests(task, 0, 300)}
    assert len(tested) > 10
    assert not trained & tested
    assert all(is_held_out(one) for one in draw_tests(task, 1, 20))
    assert (len(task.example(random, 1).question), len(task.example(random, 1).answer)) == (8, 2)
    assert reference(8, 2) is task


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("text:0:3", "raise the smallest.*say text:N:NEXT or text:N:NEXT:PLACES, such as text:12:1:4"),
        ("text:4:1:0", "at 0 places: raise the smallest"),
        ("text:a", "say text:N:NEXT"),
        ("text:1:2:3:4", "say text:N:NEXT"),
        ("text:100000:1", "no passage has 100000 words"),
    ],
)
def test_sizes_that_cannot_be_are_refused(place: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        open_task(place)
