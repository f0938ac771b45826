import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.config import settings as configuration
from penstock.config.settings import ConfigurationError, PolicySection, Progress, Settings
from penstock.runtime.retry import Interrupted
from penstock.workloads.thoughts.environment import Layout, ThoughtReinforceSection, Thoughts
from penstock.workloads.thoughts.start import (
    START_MODEL,
    Lesson,
    Lessons,
    Teacher,
    build_transformer,
    check_lengths,
    load_transformer,
    measure_loss,
    prepare,
    right_steps,
    save_transformer,
    warm_start,
)
from penstock.workloads.thoughts.tasks import Continuation, Example, Rings, Text, draw_tests
from tests.support.thoughts.small_thoughts import LAYOUT, TASK, small_base


@pytest.fixture
def lessons() -> Lessons:
    return Lessons(TASK, LAYOUT, np.random.default_rng(0))


@pytest.fixture
def example() -> Example:
    """Three hops."""
    return TASK.example(np.random.default_rng(1), 3)


def words_of(lesson: Lesson) -> tuple[str, ...]:
    """The words that are learned."""
    return LAYOUT.text(lesson.ids[lesson.start :])


def quiet() -> Progress:
    return Progress(lambda _: None, threading.Event())


def test_only_tokens_of_thought_and_answer_are_learned(lessons: Lessons, example: Example) -> None:
    assert words_of(lessons.chain(example)) == (*example.steps, "</think>", "=", *example.answer)
    assert words_of(lessons.filler(example, 4)) == (".", ".", "</think>", "=", *example.answer)
    assert words_of(lessons.empty(example)) == ("</think>", "=", *example.answer)
    assert words_of(lessons.direct(example)) == example.answer


def test_a_corrupted_thought_continues_legally_and_answers_truly(lessons: Lessons, example: Example) -> None:
    wrong = total = 0
    for _ in range(400):
        *words, end, equals, answer = words_of(lessons.corrupted(example, 0.3, 5))
        assert (end, equals, answer) == ("</think>", "=", example.answer[0])
        assert len(words) == len(example.steps)
        for place, word in enumerate(words):
            left = TASK.resume(example.question, words[:place])
            assert left is not None
            wrong += left.steps[0] != word
            total += 1
    assert wrong / total == pytest.approx(0.3, abs=0.06)


class Circles:
    """A task in which each step leads to another, and none to an end: one symbol, or several."""

    words = ("a", "b")
    levels = (1,)
    most_gain = None

    def __init__(self, *symbols: str) -> None:
        self.symbols = symbols

    def example(self, random: np.random.Generator, level: int) -> Example:
        del random
        return Example(question=("a",), answer=("b",), steps=("a",), level=level, identity="a")

    def resume(self, question: Sequence[str], thought: Sequence[str]) -> Continuation:
        del question, thought
        return Continuation(("a",), ("b",))


@pytest.mark.parametrize("symbols", [("a",), ("a", "b")])
def test_a_corrupted_thought_without_an_end_is_cut(symbols: tuple[str, ...]) -> None:
    task = Circles(*symbols)
    made = Lessons(task, Layout(task), np.random.default_rng(0))
    for _ in range(2):
        one = made.corrupted(task.example(np.random.default_rng(0), 1), 0.5, 7)
        words = Layout(task).text(one.ids[one.start : -3])
        assert len(words) == 7
        assert set(words) <= set(symbols)


def test_random_thoughts_contain_no_chain(lessons: Lessons, example: Example) -> None:
    drawn = [words_of(lessons.random(example, 3))[:-3] for _ in range(300)]
    assert {len(words) for words in drawn} == {0, 1, 2, 3}
    assert sum(words == example.steps for words in drawn) < 30


class Renamed(Rings):
    """The small rings, with their words in another order."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.words = self.words[::-1]


def settings(*, unroll_length: int = 20, baseline: str = "group", **kwargs: Any) -> Settings:
    """Of a run on small rings. kwargs: of its environment."""
    usual = {"task": "rings:6:3", "group": 4, "thought_tokens": 4}
    layer = {
        "workload": "thoughts",
        "environment": {"id": "rings", "count": 8, "kwargs": usual | kwargs},
        "actor": {"unroll_length": unroll_length},
        "algorithm": {"name": "thought_reinforce", "baseline": baseline},
    }
    return configuration.load([layer])


def test_a_model_that_is_there_is_kept_and_named(tmp_path: Path) -> None:
    small_base(tmp_path / START_MODEL)
    before = {file.name: file.read_bytes() for file in (tmp_path / START_MODEL).iterdir()}
    made = prepare(settings(), tmp_path, quiet())
    assert made.environment.kwargs["model"] == str((tmp_path / START_MODEL).absolute())
    assert made.policy.kwargs == {"lora": False, "model": made.environment.kwargs["model"]}
    assert before == {file.name: file.read_bytes() for file in (tmp_path / START_MODEL).iterdir()}


@pytest.mark.parametrize("is_named", [False, True])
def test_a_model_of_another_task_is_refused(tmp_path: Path, *, is_named: bool) -> None:
    small_base(tmp_path / START_MODEL)
    model: dict[str, Any] = {"model": str(tmp_path / START_MODEL)} if is_named else {}
    same_size = settings(task=f"{__name__}:Renamed", **model)
    with pytest.raises(ConfigurationError, match=rf"model='{tmp_path}.*task='{__name__}:Renamed'"):
        prepare(same_size, tmp_path, quiet())


@pytest.mark.parametrize(
    ("over", "named"),
    [
        ({"group": 3}, "group=3: environment.count=8"),
        ({"unroll_length": 5}, r"unroll_length=5: .*needs 16"),
        ({"task": "mazes"}, "no such task"),
        ({"thoughts": 3}, "unknown key"),
        ({"empty_share": 1.5}, "empty_share=1.5"),
        ({"hidden": 20}, "hidden=20: .*multiple of 8"),
        ({"hidden": 1_000_000_000}, "hidden=1000000000: .*less than or equal to 4096"),
        ({"layers": 65}, "layers=65: .*less than or equal to 64"),
        ({"thought_tokens": 1}, "thought_tokens=1: a legal thought .* has up to 2 steps"),
        ({"group": 1}, r"group=1: .*algorithm\.baseline='group', and nothing is learned"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(over: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        check_lengths(settings(**over))


def test_a_reward_of_another_question_needs_another_question() -> None:
    check_lengths(settings(group=1, baseline="none"))
    one = settings(group=8)
    check_lengths(one)
    another = one.model_copy(update={"algorithm": ThoughtReinforceSection(reward_from="another")})
    with pytest.raises(ConfigurationError, match=r"environment\.count=8: .*a single question.*group=8"):
        check_lengths(another)


def test_what_no_run_takes_is_refused_before_the_model_is_made(tmp_path: Path) -> None:
    usual = settings(start_updates=1)
    on_gpu = usual.model_copy(update={"learner": usual.learner.model_copy(update={"device": "cuda"})})
    odd = settings().model_copy(update={"policy": PolicySection(kwargs={"mixing": "wide"})})
    for asked, named in (
        (on_gpu, r"learner\.device='cuda': .*say cpu"),
        (odd, r"policy\.kwargs\.mixing='wide'"),
        (settings(model="nowhere"), r"environment\.kwargs\.model='nowhere': no such folder"),
        (settings(guard_rules="no.toml"), r"environment\.kwargs\.guard_rules='no\.toml': "),
        (settings(guard_classifier="no.toml"), r"environment\.kwargs\.guard_classifier='no\.toml': "),
    ):
        with pytest.raises(ConfigurationError, match=named):
            prepare(asked, tmp_path, quiet())
        assert not any(tmp_path.iterdir())


def test_a_file_of_the_guard_is_named_wherever_a_server_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_base(tmp_path / START_MODEL)
    (tmp_path / "rules.toml").write_text("[[rule]]\nname = 'b'\npattern = 'b'\n")
    monkeypatch.chdir(tmp_path)
    made = prepare(settings(guard_rules="rules.toml"), tmp_path, quiet())
    assert made.environment.kwargs["guard_rules"] == str(tmp_path / "rules.toml")
    assert "guard_classifier" not in made.environment.kwargs


def test_a_start_model_is_equal_for_equal_seeds_and_loads_from_its_folder(tmp_path: Path) -> None:
    one, same, other = (build_transformer(LAYOUT, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.lm_head.weight, same.lm_head.weight)
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
    assert one.lm_head.weight is not one.get_input_embeddings().weight
    save_transformer(one, LAYOUT, tmp_path / "model")
    assert torch.equal(load_transformer(tmp_path / "model").lm_head.weight, one.lm_head.weight)


def test_a_start_model_with_truncated_weights_is_refused_with_its_folder(tmp_path: Path) -> None:
    save_transformer(build_transformer(LAYOUT, seed=0, hidden=8, layers=1), LAYOUT, tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ConfigurationError, match=f"{tmp_path}.*cannot be read as a causal language model"):
        load_transformer(tmp_path)


def test_a_transformer_may_have_any_width_divisible_by_8() -> None:
    for hidden, heads in ((8, 1), (16, 1), (56, 2), (64, 4), (88, 4), (104, 4)):
        network = build_transformer(LAYOUT, seed=0, hidden=hidden, layers=1)
        assert network.config.num_attention_heads == heads
        with torch.no_grad():
            assert network(input_ids=torch.tensor([[1, 5, 6]])).logits.isfinite().all()


def test_a_start_with_too_many_wrong_steps_is_refused() -> None:
    network = build_transformer(LAYOUT, seed=0, hidden=16, layers=1)
    section = Thoughts(task="rings:6:3", start_updates=1)
    with pytest.raises(ConfigurationError, match=r"start_updates=1: .*0\.98 and 0\.99 are needed"):
        warm_start(network, TASK, LAYOUT, section, seed=0, progress=quiet())


def test_a_warm_start_ends_on_request() -> None:
    stop = threading.Event()
    stop.set()
    network = build_transformer(LAYOUT, seed=0, hidden=16, layers=1)
    with pytest.raises(Interrupted):
        warm_start(network, TASK, LAYOUT, Thoughts(), seed=0, progress=Progress(lambda _: None, stop))


@pytest.mark.slow
def test_a_task_with_uncertain_answers_is_learned_until_its_loss_stops_falling() -> None:
    task = Text(
        [f"{one} one two three four five six" for one in "abcdefghijklmnopqrstuvwxyz"], context=2, following=1
    )
    layout = Layout(task)
    network = build_transformer(layout, seed=0, hidden=16, layers=1)
    section = Thoughts(start="random")
    tests = [Lessons(task, layout, np.random.default_rng(0)).direct(one) for one in draw_tests(task, 2, 64)]
    before = measure_loss(network, layout, tests)
    started = warm_start(network, task, layout, section, seed=0, progress=quiet())
    assert started.loss is not None
    assert started.loss < 0.5 * before
    assert measure_loss(network, layout, tests) == pytest.approx(started.loss, abs=0.05)
    assert 0 < started.updates < section.start_updates
    assert started.right_steps is None


def test_a_lesson_that_is_repeated_is_learned() -> None:
    network = build_transformer(LAYOUT, seed=0, hidden=16, layers=1)
    teacher = Teacher(network, LAYOUT, learning_rate=3e-2)
    lesson = Lesson(tuple(range(4, 14)), 6)
    losses = [teacher.teach([lesson]) for _ in range(60)]
    assert losses[0] > 1.0
    assert losses[-1] < 0.05


def test_right_steps_are_those_whose_likeliest_token_is_legal() -> None:
    network = build_transformer(LAYOUT, seed=0, hidden=16, layers=1)
    assert right_steps(network, LAYOUT, draw_tests(TASK, 0, 64)) < 0.5
    assert right_steps(network, LAYOUT, draw_tests(TASK, 0, 8, level=1)) == 1.0
