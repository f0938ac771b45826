import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.config.settings import ConfigurationError
from penstock.workloads.thoughts import tasks
from penstock.workloads.thoughts.environment import Layout
from penstock.workloads.thoughts.tasks import (
    RARE,
    Continuation,
    Example,
    Rings,
    Text,
    check_task,
    draw,
    draw_mixed,
    draw_tests,
    is_held_out,
    open_task,
    reference,
)


def test_held_out_questions_are_never_trained_on() -> None:
    task = Rings(7, 4)
    trained = {one.identity for one in draw_mixed(task, np.random.default_rng(0), 500)}
    tested = {one.identity for one in draw_tests(task, 0, 200)}
    assert not trained & tested
    assert tested == {one.identity for one in draw_tests(task, 0, 200) if is_held_out(one)}
    assert {one.level for one in draw_tests(task, 0, 20)} == {4}
    assert draw_tests(task, 5, 10) == draw_tests(task, 5, 10)


def test_a_task_without_a_question_of_a_side_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_TRIES", 50)
    task: Any = examples(lambda one, _: changed(one, identity="one"))
    refused = 0
    for held_out in (True, False):
        try:
            draw(task, np.random.default_rng(0), 1, held_out=held_out)
        except ConfigurationError:
            refused += 1
    assert refused == 1


def test_a_question_contains_the_ring_of_its_answer() -> None:
    task, random = Rings(7, 4), np.random.default_rng(3)
    for level in task.levels:
        one = task.example(random, level)
        edges = dict(edge.split(">") for edge in one.question[:7])
        assert sorted(edges) == sorted(edges.values()) == list(task.symbols)
        here, way = one.question[7], []
        for _ in range(level):
            here = edges[here]
            way.append(here)
        assert (*one.steps, *one.answer) == tuple(way)
        assert one.question[8] == f"k{level}"
        assert {*one.question, *one.answer} <= set(task.words)
    small = Rings(4, 2)
    assert len({small.example(random, 2).identity for _ in range(300)}) == math.factorial(3)


def test_after_a_wrong_step_the_check_continues_from_its_end() -> None:
    task = Rings(4, 2)
    question = ("a>b", "b>c", "c>d", "d>a", "a", "k2")
    right = task.resume(question, ())
    assert right is not None
    assert (right.steps, right.answer) == (("b",), ("c",))
    wrong = task.resume(question, ("d",))
    assert wrong is not None
    assert (wrong.steps, wrong.answer) == ((), ("a",))
    assert task.resume(question, ("b", "c")) is None
    assert task.resume(question, ("a>b",)) is None


class Fine:
    """A task that holds to all of it: rings, told anew."""

    words, symbols = Rings(6, 2).words, Rings(6, 2).symbols
    levels: Any = (1, 2)
    most_gain: Any = None

    def example(self, random: np.random.Generator, level: int) -> Any:
        return Rings(6, 2).example(random, level)

    def resume(self, question: Sequence[str], thought: Sequence[str]) -> Any:
        return Rings(6, 2).resume(question, thought)


def with_parts(**parts: Any) -> Fine:
    made: Fine = type("Odd", (Fine,), parts)()
    return made


def examples(change: Callable[[Example, np.random.Generator], Any]) -> Fine:
    """A task whose examples are changed. change: gets the example and its source of chance."""

    def example(self: Fine, random: np.random.Generator, level: int) -> Any:
        return change(Fine.example(self, random, level), random)

    return with_parts(example=example)


def changed(example: Example, **parts: Any) -> Any:
    return replace(example, **parts)


def in_time(example: Example, random: np.random.Generator) -> Example:
    if random.random() < 0.05:
        raise LookupError("no more questions")
    return example


def unready(self: Fine) -> Any:
    raise OSError("no list of words")


OTHER_CHANCE = np.random.default_rng(1)


def as_list(self: Fine, question: Sequence[str], thought: Sequence[str]) -> Any:
    """Steps as a list, which equals no thought."""
    left = Fine.resume(self, question, thought)
    return left and Continuation(list(left.steps), left.answer)  # type: ignore[arg-type]


def of_any_length(self: Fine, question: Sequence[str], thought: Sequence[str]) -> Any:
    left = Fine.resume(self, question, thought)
    assert left is not None
    return left


def test_a_task_that_fits_is_taken() -> None:
    check_task(Fine())
    check_task(Rings(7, 4))
    assert draw_tests(open_task(f"{__name__}:Fine"), 1, 3)[0].level == 2


@pytest.mark.parametrize(
    ("task", "named"),
    [
        (with_parts(words=(word for word in Fine.words)), "words=.*a tuple of words"),
        (with_parts(symbols="abcde"), "symbols='abcde'"),
        (with_parts(levels=("easy", "hard")), "levels=.*whole numbers"),
        (with_parts(levels=(1, 1)), "levels=.*each once"),
        (with_parts(levels=3), "levels=3: give a tuple"),
        (with_parts(levels={1, 2}), "levels={1, 2}: give a tuple"),
        (with_parts(words=(*Fine.words, "a b")), "has a blank"),
        (with_parts(words=property(unready)), "words raised OSError: no list of words"),
        (with_parts(most_gain="1.9"), "most_gain='1.9'"),
        (with_parts(most_gain=float("nan")), "most_gain=nan"),
        (examples(lambda *_: ("a", "b")), r"example\(random, 1\) returned \('a', 'b'\)"),
        (examples(lambda one, _: changed(one, answer=one.answer[0])), "answer='.'; give a tuple"),
        (examples(lambda one, _: changed(one, question=list(one.question))), r"question=\["),
        (examples(lambda one, _: changed(one, identity=7)), "identity=7"),
        (examples(lambda one, _: changed(one, level=9)), "level=9"),
        (examples(lambda one, _: changed(one, identity="one")), "20,000 questions of level 1, and none is"),
        (examples(in_time), "raised LookupError: no more questions"),
        (examples(lambda one, _: Fine().example(OTHER_CHANCE, one.level)), "two questions for equal draws"),
        (
            examples(lambda one, random: changed(one, answer=("z",)) if random.random() < 0.05 else one),
            r"not made of its words: \['z'\]",
        ),
        (examples(lambda one, _: changed(one, steps=("a", "a"))), r"resume\(question, \(\)\) must give"),
        (with_parts(resume=lambda *_: ((), ())), "return a Continuation or None"),
        (with_parts(resume=as_list), r"steps=\["),
        (with_parts(resume=of_any_length), "raised AssertionError.*return None where nothing follows"),
    ],
)
def test_settings_that_do_not_fit_are_named(task: Fine, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        check_task(task)


class WithoutResume:
    words = symbols = ("a",)
    levels = (1,)


def without_its_file() -> Fine:
    raise FileNotFoundError("letters.txt")


def of_size(size: int) -> Fine:
    raise AssertionError(size)


@pytest.mark.parametrize(
    ("place", "named"),
    [
        ("mazes", "rings:N:HOPS"),
        ("rings:x:4", "rings:11:6"),
        ("rings:7:4:2", "rings:11:6"),
        ("rings:3:2", "4 to 26"),
        ("rings:27:2", "4 to 26"),
        ("rings:7:6", "2 to 5"),
        ("rings:5:2", "none is held out: .*; say rings:N:HOPS"),
        ("no_such_module:task", "cannot be loaded"),
        (f"{__name__}:without_its_file", "it raised FileNotFoundError: letters.txt"),
        (f"{__name__}:of_size", "called without arguments, .*'size'"),
        (f"{__name__}:WithoutResume", "example, resume"),
    ],
)
def test_an_invalid_task_is_refused_with_the_reason(place: str, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named) as refused:
        open_task(place)
    assert place in str(refused.value)


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


def test_no_question_has_two_answers_or_a_rare_word() -> None:
    task = Text(["a b c d a b e", "a b c d f"], words=5, context=2, following=1)
    examples = [task.example(np.random.default_rng(seed), 1) for seed in range(200)]
    answers = {
        one.question: {other.answer for other in examples if other.question == one.question}
        for one in examples
    }
    assert all(len(given) == 1 for given in answers.values())
    assert all(RARE not in one.answer for one in examples)
    assert len(task.words) == len(set(task.words)) == 5


def test_thoughts_at_several_places_of_a_passage_follow_one_another() -> None:
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


def test_places_can_be_chosen_by_the_words_before_them() -> None:
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
def test_invalid_sizes_are_refused(place: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        open_task(place)
