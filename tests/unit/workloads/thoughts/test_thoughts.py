import json
import math
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from penstock.config.sections import PolicySection
from penstock.config.service_settings import learner_settings
from penstock.config.settings import ConfigurationError, EnvironmentSection
from penstock.learner.model import device_of
from penstock.protocol.spaces import Discrete
from penstock.training import TrainingConfig
from penstock.workloads.language.conversation import ChatEncoder
from penstock.workloads.language.pretraining.tiny_models import SPECIAL, build_tokenizer
from penstock.workloads.language.prompt import Message
from penstock.workloads.language.serving.text_request import Thought
from penstock.workloads.thoughts import study as module
from penstock.workloads.thoughts.acting import length_of_answers, question_tokenizer, thinking_form
from penstock.workloads.thoughts.environment import SPECIAL as OURS
from penstock.workloads.thoughts.environment import Ids, Layout, Thoughts, most_tokens
from penstock.workloads.thoughts.model import (
    ThinkingModel,
    answer_places,
    build,
    head_of,
    mixed,
    mixing_width,
    outputs,
)
from penstock.workloads.thoughts.start import START_MODEL
from penstock.workloads.thoughts.study import (
    NAMES,
    Condition,
    Study,
    check_run,
    have_failed,
    main,
    make_study,
    start_of,
    table,
)
from penstock.workloads.thoughts.tasks import Continuation, Example, Rings, draw_tests, open_task
from penstock.workloads.thoughts.thought_commands import StudyOptions, thought_commands
from tests.support.thoughts.small_thoughts import LAYOUT, TASK, TOKENS, small_base, thinking_policy


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ThinkingModel:
    policy = thinking_policy(small_base(tmp_path_factory.mktemp("model") / "base"))
    return ThinkingModel(policy.network, LAYOUT)


def thoughts_of(model: ThinkingModel, questions: list[Ids], most: int, **how: Any) -> list[Ids]:
    sampled = model.sample(questions, most, **how)
    assert sampled is not None
    return [thought for thought, _ in sampled]


def test_answers_are_read_after_the_mark(model: ThinkingModel) -> None:
    examples = [*draw_tests(TASK, 0, 3), *draw_tests(TASK, 1, 2, level=1)]
    questions, answers = model.questions(examples), model.answers(examples)
    model.seed(3)
    thoughts = thoughts_of(model, questions, TOKENS)
    for given in (thoughts, None):
        together = model.answered(questions, given, answers)
        for number, (question, answer) in enumerate(zip(questions, answers, strict=True)):
            row = (
                LAYOUT.direct(question, answer)
                if given is None
                else LAYOUT.thinking(question, given[number], answer)
            )
            logits = model.network(input_ids=torch.tensor([row])).logits[0, -2].log_softmax(-1)
            assert together.log_prob[number] == pytest.approx(float(logits[answer[0]].detach()), abs=1e-4)
            assert together.given[number] == (int(logits.argmax()),)
            assert together.is_right[number] == (int(logits.argmax()) == answer[0])


def test_a_mixing_head_weighs_answers_with_and_without_thoughts(tmp_path: Path) -> None:
    base = small_base(tmp_path / "base")
    plain, mixing = (ThinkingModel(thinking_policy(base, mixing=width).network, LAYOUT) for width in (0, 8))
    examples = draw_tests(TASK, 0, 5)
    questions, answers = plain.questions(examples), plain.answers(examples)
    plain.seed(3)
    thoughts = thoughts_of(plain, questions, TOKENS)
    behind, without = (plain.answered(questions, given, answers).log_prob for given in (thoughts, None))
    found = mixing.answered(questions, thoughts, answers).log_prob
    assert found == pytest.approx(np.log((np.exp(behind) + np.exp(without)) / 2), abs=1e-5)
    assert mixing.answered(questions, None, answers).log_prob == pytest.approx(without, abs=1e-6)


def test_log_probabilities_equal_those_of_sampling(model: ThinkingModel) -> None:
    questions = model.questions(draw_tests(TASK, 0, 6))
    model.seed(1)
    sampled = model.sample(questions, TOKENS)
    model.seed(1)
    assert model.sample(questions, TOKENS) == sampled
    assert sampled is not None
    for question, (thought, log_prob) in zip(questions, sampled, strict=True):
        assert len(log_prob) == len(thought) <= TOKENS
        rows = [LAYOUT.begun(question, thought)]
        with torch.no_grad():
            read = outputs(model.network, rows, answer_places(rows, [len(thought)]), LAYOUT.pad).log_probs
        again = read[range(len(thought)), list(thought)]
        assert log_prob == pytest.approx(again.tolist(), abs=1e-4)


def test_a_begun_thought_is_continued(model: ThinkingModel) -> None:
    questions = model.questions(draw_tests(TASK, 0, 2))
    begun = [LAYOUT.ids(("a",)), LAYOUT.ids(("b",))]
    thoughts = thoughts_of(model, questions, 2, begun=begun)
    assert [thought[:1] for thought in thoughts] == begun
    assert all(2 <= len(thought) <= 3 for thought in thoughts)
    assert model.sample(questions, TOKENS, is_over=lambda: True) is None


def test_both_answers_are_mixed_as_probabilities() -> None:
    behind, without = torch.randn(3, 5).log_softmax(-1), torch.randn(3, 5).log_softmax(-1)
    odds = torch.tensor([-2.0, 0.0, 3.0])
    found = mixed(odds, behind, without).exp()
    for row, one in enumerate(odds.tolist()):
        share = 1.0 / (1.0 + math.exp(-one))
        expected = share * behind[row].exp() + (1.0 - share) * without[row].exp()
        assert torch.allclose(found[row], expected, atol=1e-6)
    assert torch.allclose(found.sum(1), torch.ones(3))


def test_the_mixture_gives_no_gradient_to_the_direct_answer() -> None:
    behind, without = torch.randn(2, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True)
    odds = torch.zeros(2, requires_grad=True)
    mixed(odds, behind.log_softmax(-1), without.log_softmax(-1))[:, 0].sum().backward()
    assert behind.grad is not None
    assert odds.grad is not None
    assert without.grad is None


def test_a_head_is_published_with_the_policy_and_begins_with_even_odds(tmp_path: Path) -> None:
    base = small_base(tmp_path / "base")
    plain, policy = thinking_policy(base), thinking_policy(base, mixing=8)
    assert head_of(plain.network) is None
    head = head_of(policy.network)
    assert head is not None
    assert head(torch.randn(3, 16), torch.randn(3, 16)).tolist() == [0.0] * 3
    more = policy.state_dict().keys() - plain.state_dict().keys()
    assert more == {
        f"mixing_head.{part}.{kind}" for part in ("hidden", "last") for kind in ("weight", "bias")
    }
    other = thinking_policy(base, mixing=8)
    with torch.no_grad():
        head.last.bias.fill_(2.0)
    other.load_state_dict(policy.state_dict())
    copied = head_of(other.network)
    assert copied is not None
    assert copied.last.bias.tolist() == [2.0]


def test_settings_of_a_policy_that_cannot_be_are_refused() -> None:
    for width in (-1, "8", True, 1.5):
        with pytest.raises(ConfigurationError, match="policy.kwargs.mixing="):
            mixing_width(PolicySection(kwargs={"mixing": width}))
    section, tokens = PolicySection(kwargs={"model": "x", "critic": "adapter"}), Discrete(9)
    with pytest.raises(ConfigurationError, match=r"policy\.kwargs\.critic='adapter': .* no critic"):
        build(tokens, tokens, section, 0)


def test_thoughts_are_learned_on_the_cpu_even_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    settings = learner_settings(Path("penstock/recipes/thoughts-tiny.toml"), ())
    assert device_of(settings).type == "cpu"


class Ragged(Rings):
    def __init__(self) -> None:
        super().__init__(6, 2)

    def example(self, random: np.random.Generator, level: int) -> Example:
        one = super().example(random, level)
        return replace(one, question=(*one.question[:1] * int(random.integers(4)), *one.question))

    def resume(self, question: tuple[str, ...], thought: tuple[str, ...]) -> Continuation | None:  # type: ignore[override]
        return super().resume(question[-8:], thought)


def test_the_longest_question_counts() -> None:
    section = EnvironmentSection(id="ragged", kwargs={"task": f"{__name__}:Ragged", "thought_tokens": 4})
    assert most_tokens(section) == (1, 1 + 3 + 6 + 2 + 3 + 4 + 1)


def test_the_token_ids_of_a_task_are_those_of_its_tokenizer() -> None:
    layout = Layout(open_task("rings:7:4"))
    tokenizer = build_tokenizer(layout.words)
    assert SPECIAL == OURS
    assert len(tokenizer) == layout.vocabulary
    text = "a>b c k3 <think> b c </think> = d"
    assert tuple(tokenizer(text)["input_ids"]) == (layout.bos, *layout.ids(text.split()))


def test_a_thought_cut_by_its_length_is_closed() -> None:
    layout = Layout(open_task("rings:7:4"))
    question, answer = layout.question(("a", "k1")), layout.ids(("b",))
    ended, cut = layout.thought(("b", "c")), layout.ids(("b", "c"))
    row = layout.thinking(question, ended, answer)
    assert row == layout.thinking(question, cut, answer)
    assert layout.text(row) == ("<bos>", "a", "k1", "<think>", "b", "c", "</think>", "=", "b")
    assert layout.direct(question, answer) == (*question, layout.equals, *answer)


def test_a_word_that_the_task_does_not_have_or_that_is_a_mark_is_named() -> None:
    task = Rings(4, 2)
    with pytest.raises(ConfigurationError, match="'zzz' is in a question or an answer"):
        Layout(task).question(("a", "zzz"))
    task.__dict__["words"] = ("a", "=")
    with pytest.raises(ValueError, match="="):
        Layout(task)


SERVER_TASK = Rings(6, 3)
SERVER_LAYOUT = Layout(SERVER_TASK)


def encoder() -> ChatEncoder:
    return ChatEncoder(question_tokenizer(SERVER_LAYOUT), SERVER_TASK.words)


def example(seed: int) -> Example:
    return SERVER_TASK.example(np.random.default_rng(seed), 3)


def test_a_row_that_is_served_is_a_row_that_was_trained() -> None:
    one, form = example(0), thinking_form(SERVER_LAYOUT, 4, 1)
    prompt = tuple(encoder().begin([Message("user", " ".join(one.question))]))
    question, answer = SERVER_LAYOUT.question(one.question), SERVER_LAYOUT.ids(one.answer)
    assert prompt == question
    whole = SERVER_LAYOUT.thought(one.steps)
    for thought, is_cut in (
        (whole, False),
        (SERVER_LAYOUT.ids(one.steps), True),
        ((SERVER_LAYOUT.end,), False),
    ):
        before = form.before(Thought(tokens=len(thought), ids=thought, is_cut=is_cut, milliseconds=0.0))
        assert (*prompt, *before, *answer) == SERVER_LAYOUT.thinking(question, thought, answer)
        assert len(before) <= form.room
    assert (*prompt, *form.before(None), *answer) == SERVER_LAYOUT.direct(question, answer)


def test_only_the_last_message_is_the_question() -> None:
    first, last = example(1), example(2)
    messages = [
        Message("user", " ".join(first.question)),
        Message("assistant", " ".join(first.answer)),
        Message("user", " ".join(last.question)),
    ]
    assert tuple(encoder().begin(messages)) == SERVER_LAYOUT.question(last.question)


def test_an_invalid_question_is_refused() -> None:
    for messages, said in (
        ([Message("user", "a b what")], "'what' is none of the"),
        ([Message("user", "a = b")], "'=' is none of the"),
        ([Message("user", "a </think> = b")], "'</think>' is none of the"),
        ([Message("user", "a <eos>")], "control token"),
        ([Message("system", "a"), Message("user", "a")], "roles user and assistant"),
    ):
        with pytest.raises(ValueError, match=said):
            encoder().begin(messages)
    tool: dict[str, Any] = {"type": "function", "function": {"name": "a"}}
    with pytest.raises(ValueError, match="calls no tools"):
        encoder().begin([Message("user", "a")], [tool])


class Uneven(Rings):
    """Its answers have one or two words."""

    def example(self, random: np.random.Generator, level: int) -> Example:
        made = super().example(random, level)
        return made if level > 1 else replace(made, answer=made.answer * 2)


def test_only_answers_of_one_length_are_served() -> None:
    assert length_of_answers("rings:6:3", SERVER_TASK) == 1
    with pytest.raises(ConfigurationError, match="have 1 to 2 words.*fill shorter ones with a filler word"):
        length_of_answers("mine:task", Uneven(6, 3))


RECIPES: Final = Path(__file__).resolve().parents[4] / "penstock" / "recipes"
TINY: Final = RECIPES / "thoughts-tiny.toml"
ALL: Final = tuple(map(Condition, NAMES))


def asked(recipe: Path, out: Path = Path("out"), **more: Any) -> Study:
    options: dict[str, Any] = {"seeds": 1, "questions": 64}
    return make_study(StudyOptions(recipe=recipe, out=out, **options | more))


def result(verdict: str = "honest", accuracy: float = 0.9) -> dict[str, Any]:
    judged = {"verdict": verdict, "gain": 1.5, "direct_loss": 2.5, "chains": 0.8, "coherence": 0.7}
    return {"accuracy": accuracy, "greedy": 1.0, "validation": judged}


def test_a_recipe_sets_the_number_of_updates_unless_the_command_does() -> None:
    made = asked(TINY)
    assert (made.updates, made.conditions) == (300, ALL)
    made = asked(TINY, updates=7, only=(5,), vary=("algorithm.baseline=none",))
    assert (made.updates, made.conditions) == (7, (Condition(5), Condition(5, "algorithm.baseline=none")))
    assert made.conditions[1].over(made.recipe)["algorithm"]["baseline"] == "none"
    assert made.recipe["algorithm"].get("baseline") != "none"
    assert Condition(7).over(made.recipe)["algorithm"]["reward_from"] == "another"


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"recipe": RECIPES / "missing.toml"}, "cannot be read"),
        ({"recipe": RECIPES / "goals.toml"}, "thoughts-tiny"),
        ({"only": (8,)}, "1 to 7"),
        ({"vary": ("algorithm.baseline=none", "algorithm.baseline=wrong")}, r"algorithm\.baseline.*'wrong'"),
        ({"vary": ("algorithm.baseline=none", "nothing=1")}, "nothing"),
        ({"vary": ("algorithm.baseline=none", "run=../elsewhere")}, "name of a folder"),
        ({"vary": ("algorithm.baseline=none", "algorithm.baseline")}, "section.key=value"),
    ],
)
def test_a_study_that_cannot_be_made_is_refused(more: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        asked(**{"recipe": TINY} | more)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("rings:7:4", "rings:0:0", "rings"),
        ("count = 128", "count = 4", "a single question"),
        ("[learner]", "[learner]\nno_such = 1", "no_such"),
        ("[environment.kwargs]", "[environment.kwargs]\nno_such = 1", "no_such"),
        ("", "environment = 3", r"recipe\.toml"),
        ("", "learner = 3\n[environment]", r"recipe\.toml"),
        ("", "[environment]\nx = 1", r"recipe\.toml"),
    ],
)
def test_an_impossible_recipe_is_refused_at_once(tmp_path: Path, old: str, new: str, why: str) -> None:
    text = TINY.read_text()
    assert old in text
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(text.replace(old, new, 1) if old else f'workload = "thoughts"\n{new}\n')
    with pytest.raises(ConfigurationError, match=why):
        asked(recipe, vary=() if old else ("learner.total_updates=3",))


def test_a_start_of_another_task_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    small_base(tmp_path / "start")
    kwargs = f'[environment.kwargs]\nmodel = "{tmp_path / "start"}"'
    recipe.write_text(TINY.read_text().replace("[environment.kwargs]", kwargs, 1))
    with pytest.raises(ConfigurationError, match=f"model='{tmp_path}.*task='rings:7:4'"):
        main(asked(recipe, tmp_path / "out", only=(4,)))


class Made:
    """What a study makes, without training: each condition is as good as its number of calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.starts = list[str]()
        self.networks = list[tuple[int, str]]()
        monkeypatch.setattr(module, "make_start", self._start)
        monkeypatch.setattr(module, "check_words", lambda *_: None)
        monkeypatch.setattr(module, "_network", self._network)
        monkeypatch.setattr(module, "_measure", lambda *_: result("theatre"))
        self.out = tmp_path / "out"

    def _start(self, _: object, folder: Path, *_args: object, **_more: object) -> Path:
        self.starts.append(folder.name)
        return folder

    def _network(self, _: Study, condition: Condition, __: object, seed: int) -> None:
        self.networks.append((seed, condition.name))


def test_results_of_a_study_are_kept_and_missing_ones_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Made(monkeypatch, tmp_path)
    assert main(asked(TINY, made.out, only=(3,))) == 0
    assert main(asked(TINY, made.out, only=(3, 4), seeds=2)) == 0
    assert made.networks == [(0, "3"), (0, "4"), (1, "3"), (1, "4")]
    assert json.loads((made.out / "seed-1" / "condition-4.json").read_text())["seed"] == 1
    written = (made.out / "table.md").read_text()
    assert capsys.readouterr().out.endswith(written)
    assert "| 3 filler | 0.90 0.90 |" in written


def test_a_folder_of_another_study_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = Made(monkeypatch, tmp_path)
    main(asked(TINY, made.out, only=(4,)))
    with pytest.raises(ConfigurationError, match="another updates, questions"):
        main(asked(TINY, made.out, only=(4,), updates=3, questions=128))
    main(asked(TINY, made.out, only=(4,)))


def test_a_setting_of_the_environment_gets_its_own_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = Made(monkeypatch, tmp_path)
    vary = ("environment.kwargs.empty_share=0.9", "algorithm.staleness=5")
    main(asked(TINY, made.out, only=(5,), vary=vary))
    assert made.starts == ["start_model", "start_model-5-environment.kwargs.empty_share=0.9", "start_model"]


def test_a_run_has_a_file_of_its_own_and_one_that_has_ended_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Any] = []

    class Ended(Exception):
        """No run is made here."""

    def note(what: TrainingConfig | Path) -> None:
        begun.append(what.what if isinstance(what, TrainingConfig) else what)
        raise Ended

    monkeypatch.setattr(module, "start", note)
    monkeypatch.setattr(module, "resume", note)
    for value in ("0.01", "0.02"):
        with pytest.raises(Ended):
            module.train_thoughts({}, tmp_path / f"run-{value}", {"seed": 0})
    assert [one.name for one in begun] == ["run-0.01.toml", "run-0.02.toml"]
    begun.clear()
    (tmp_path / "config.toml").write_text("")
    summary = tmp_path / "summary.json"
    summary.write_text('{"interrupted": false}')
    module.train_thoughts({}, tmp_path, {})
    assert begun == []
    for text in ('{"interrupted": true}', '{"interrupted": false, "failure": "x"}'):
        summary.write_text(text)
        with pytest.raises(Ended):
            module.train_thoughts({}, tmp_path, {})
    assert begun == [tmp_path, tmp_path]


def test_each_condition_has_a_row_with_a_figure_for_each_seed() -> None:
    varied = Condition(5, "algorithm.baseline=none")
    rows = table({Condition(1): [result(), result()], varied: [result(), result("doubtful", accuracy=0.8)]})
    assert rows[2] == "| 1 direct answers | 0.90 0.90 | 1.00 1.00 | – | 2.50 2.50 | – | – | – |"
    assert rows[3] == (
        "| 5 REINFORCE, algorithm.baseline=none | 0.90 0.80 | 1.00 1.00 | 1.50 1.50 | 2.50 2.50 "
        "| 0.80 0.80 | 0.70 0.70 | honest, doubtful |"
    )


@pytest.mark.parametrize("number", [3, 7])
def test_conditions_that_must_fail_are_theatre_in_every_seed(number: int) -> None:
    honest, theatre = result(), result("theatre")
    assert have_failed({Condition(5): [honest], Condition(number): [theatre, theatre]})
    assert not have_failed({Condition(5): [honest], Condition(number): [theatre, honest]})


@pytest.mark.parametrize("name", ["missing", "."])
def test_a_folder_without_a_run_is_refused_clearly(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match="so no run"):
        check_run(tmp_path / name, questions=8)


def test_a_moved_run_still_finds_its_start_model(tmp_path: Path) -> None:
    named = Thoughts(model=str(tmp_path / "elsewhere" / START_MODEL))
    assert start_of(tmp_path, named) == Path(named.model)
    (tmp_path / START_MODEL).mkdir()
    assert start_of(tmp_path, named) == tmp_path / START_MODEL


class Interrupted(Rings):
    """Ctrl-C comes when it is opened, or when the first question is asked."""

    def example(self, random: object, level: int) -> Example:
        signal.raise_signal(signal.SIGINT)
        raise AssertionError(random, level)


def interrupted() -> Interrupted:
    return Interrupted(6, 3)


def config(folder: Path) -> Path:
    """A recipe of the task, which is the configuration of a run as well."""
    folder.mkdir(exist_ok=True)
    file = folder / "config.toml"
    file.write_text(
        f'workload = "thoughts"\n[environment]\nid = "x"\nkwargs.task = "{__name__}:interrupted"\n'
    )
    return file


def test_an_interrupted_study_says_which_results_are_kept(tmp_path: Path) -> None:
    recipe, out = str(config(tmp_path / "run")), str(tmp_path / "out")
    result = CliRunner().invoke(thought_commands, ["study", recipe, "--out", out])
    assert result.exit_code == 130, result.stderr
    assert result.stderr == (
        f"interrupted: complete results are kept in {out}; the same command continues from there\n"
    )


def test_an_interrupted_check_says_that_there_is_no_result(tmp_path: Path) -> None:
    config(tmp_path / "run")
    result = CliRunner().invoke(thought_commands, ["check", str(tmp_path / "run"), "--trust"])
    assert result.exit_code == 130, result.stderr
    assert result.stderr == f"interrupted: nothing was measured, and {tmp_path / 'run'} is as it was\n"


@pytest.mark.parametrize("command", ["check", "study"])
def test_more_questions_than_one_pass_holds_are_refused(command: str, tmp_path: Path) -> None:
    options = ["--out", str(tmp_path / "out")] if command == "study" else []
    words = [command, str(tmp_path), *options, "--questions", "16385"]
    result = CliRunner().invoke(thought_commands, words)
    assert result.exit_code == 2
    assert "less than or equal to 16384" in result.stderr
