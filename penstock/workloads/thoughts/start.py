"""The warm start: a model is taught single steps, then to think badly.

Reinforcement selects steps and hardly teaches them, so they are taught first. Then the model is taught to
leave most thoughts empty and to make mistakes in the others: reinforcement has to discover that thinking
pays. A task without certain answers has no steps to get right: its model is taught answers until their loss
falls no further.
"""

import copy
import json
import math
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.config.settings import ConfigurationError, EnvironmentSection, Progress, Settings
from penstock.runtime.retry import Interrupted
from penstock.workloads.language.guard import read_guard_files
from penstock.workloads.language.policy import LanguageSection, make_network
from penstock.workloads.language.pretraining import tiny_models
from penstock.workloads.language.settings import quieten, whole_folder
from penstock.workloads.language.tokenizer import load_tokenizer
from penstock.workloads.thoughts.environment import (
    Ids,
    Layout,
    Thoughts,
    most_tokens,
    task_of,
    thoughts_section,
)
from penstock.workloads.thoughts.model import ThinkingModel, answer_places, mixing_width, outputs
from penstock.workloads.thoughts.tasks import Example, Task, draw, draw_mixed, draw_tests, follow

# ---- Rows for teaching: answers without a thought, and thoughts of several kinds.


@dataclass(frozen=True, slots=True)
class Lesson:
    """ids: the row. start: index of the first token that is learned."""

    ids: Ids
    start: int


class Lessons:
    """Makes lessons of one task. random: draws corruptions."""

    def __init__(self, task: Task, layout: Layout, random: np.random.Generator) -> None:
        self._task, self._layout, self._random = task, layout, random

    def direct(self, example: Example) -> Lesson:
        layout = self._layout
        question = layout.question(example.question)
        return Lesson(layout.direct(question, layout.ids(example.answer)), len(question) + 1)

    def thought(self, example: Example, words: Sequence[str]) -> Lesson:
        """Return a thought of these words, followed by the true answer."""
        layout = self._layout
        question = layout.question(example.question)
        row = layout.thinking(question, layout.thought(words), layout.ids(example.answer))
        return Lesson(row, len(question) + 1)

    def chain(self, example: Example) -> Lesson:
        return self.thought(example, example.steps)

    def filler(self, example: Example, most: int) -> Lesson:
        """Return a thought of fillers, as long as the legal one; of `most` words where that has no step."""
        return self.thought(example, ["."] * (len(example.steps) or most))

    def random(self, example: Example, most: int) -> Lesson:
        """Return a thought of up to `most` random words without information."""
        make = getattr(self._task, "random_thought", None)
        if make is not None:
            return self.thought(example, make(self._random, most))
        drawn = self._random.choice(self._task.symbols, size=self._random.integers(most + 1))
        return self.thought(example, drawn.tolist())

    def empty(self, example: Example) -> Lesson:
        return self.thought(example, ())

    def corrupted(self, example: Example, wrong: float, most: int) -> Lesson:
        """Return a thought in which each step is wrong with this probability, followed by the true answer.

        With the true answer the model stays unsure of the answer behind its own bad thoughts: mistakes that
        it is sure of would cost so much that reinforcement would first learn not to think.
        """
        words: list[str] = []
        while len(words) < most:
            left = follow(self._task, example.question, words)
            if left is None or not left.steps:
                break
            step = left.steps[0]
            if self._random.random() < wrong:
                others = [one for one in self._task.symbols if one != step]
                step = others[self._random.integers(len(others))] if others else step
            words.append(step)
        return self.thought(example, words)


_RIGHT_STEPS: Final = 0.98
_RIGHT_ANSWERS: Final = 0.99
_TESTED: Final = 512
_LOOK: Final = 50
"""Updates between two measurements."""
_THOUGHTS: Final = 64
_DIRECT: Final = 32
_EASY: Final = 16
"""Of the direct answers, those to the easiest questions."""
_EASY_THOUGHTS: Final = 48
"""Of the random thoughts, those on the easiest questions."""
_PATIENCE: Final = 4
"""Measurements without a smaller loss that end the start of a task without certain answers."""
_LEAST_FALL: Final = 0.005
"""Nats per token by which a loss must fall to count as smaller."""
_RISE: Final = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The result of a warm start.

    updates: of the first part. right_steps: share of the steps of legal thoughts whose likeliest token is
    right, of the hardest held-out questions; None where no legal thought is taught. right_answers: share of
    the easiest questions that are answered right without a thought. loss: nats per token of held-out answers
    without a thought; None where the steps decide when the start ends.
    """

    updates: int
    right_steps: float | None
    right_answers: float
    loss: float | None = None


class Teacher:
    """Trains a model by cross-entropy; used by one thread. stop: when set, `teach` raises Interrupted."""

    def __init__(
        self, network: Any, layout: Layout, *, learning_rate: float, stop: threading.Event | None = None
    ) -> None:
        self._network, self._layout, self._rate, self._stop = network, layout, learning_rate, stop
        self._optimiser = torch.optim.AdamW(
            network.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0
        )
        self._updates = 0

    def teach(self, lessons: Sequence[Lesson]) -> float:
        """Make one update on lessons and return the loss, in nats per token."""
        if self._stop is not None and self._stop.is_set():
            raise Interrupted
        loss = _loss(self._network, self._layout, lessons)
        self._optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._network.parameters(), 1.0)
        self._updates += 1
        for group in self._optimiser.param_groups:
            group["lr"] = self._rate * min(1.0, self._updates / _RISE)
        self._optimiser.step()
        return float(loss.detach())


def warm_start(
    network: Any, task: Task, layout: Layout, section: Thoughts, *, seed: int, progress: Progress
) -> Started:
    """Train a new network to the state in which reinforcement begins.

    Raises ConfigurationError where its steps are not right after `start_updates`, and Interrupted.
    """
    start = _WarmStart(network, task, layout, section, seed, progress)
    if not getattr(task, "is_certain", True):
        return start.until_no_better()
    started = start.until_right()
    start.corrupt()
    return started


class _WarmStart:
    def __init__(
        self, network: Any, task: Task, layout: Layout, section: Thoughts, seed: int, progress: Progress
    ) -> None:
        self._network, self._task, self._layout = network, task, layout
        self._section, self._progress = section, progress
        self._random = np.random.default_rng(seed)
        self._lessons = Lessons(task, layout, self._random)

    def _teacher(self, rate: float) -> Teacher:
        return Teacher(self._network, self._layout, learning_rate=rate, stop=self._progress.stop)

    def until_right(self) -> Started:
        """Teach legal thoughts, or random ones where `start` is random, until the tests are passed."""
        teacher, section = self._teacher(2e-3), self._section
        started = Started(updates=0, right_steps=0.0, right_answers=0.0)
        shows_chains = section.start != "random"
        for number in range(1, section.start_updates + 1):
            shown = (
                [self._lessons.chain(one) for one in self._mixed(_THOUGHTS)]
                if shows_chains
                else self._random_thoughts()
            )
            teacher.teach([*shown, *self._direct()])
            if number % _LOOK == 0:
                started = self._measure(number, shows_chains=shows_chains)
                steps = 1.0 if started.right_steps is None else started.right_steps
                if steps >= _RIGHT_STEPS and started.right_answers >= _RIGHT_ANSWERS:
                    return started
            if number % (10 * _LOOK) == 0:
                self._progress.say(f"warm start: {number} updates, {_summary(started)}")
        raise ConfigurationError(
            f"environment.kwargs.start_updates={section.start_updates}: the warm start did not get its steps "
            f"right: {_summary(started)}, and {_RIGHT_STEPS} and {_RIGHT_ANSWERS} are needed; raise it, or "
            "environment.kwargs.hidden, or choose another seed"
        )

    def corrupt(self) -> None:
        teacher = self._teacher(1e-3)
        for _ in range(self._section.corrupted_updates):
            teacher.teach([*map(self._bad_thought, self._mixed(_THOUGHTS)), *self._direct()])

    def until_no_better(self) -> Started:
        """Teach answers until those of held-out questions get no better; leave the network at its best."""
        teacher, network, most = self._teacher(2e-3), self._network, self._section.thought_tokens - 1
        tests = [self._lessons.direct(one) for one in draw_tests(self._task, 2, _TESTED)]
        best, best_at, kept = math.inf, 0, copy.deepcopy(network.state_dict())
        for number in range(1, self._section.start_updates + 1):
            shown = [self._lessons.random(one, most) for one in self._mixed(_THOUGHTS)]
            teacher.teach([*shown, *map(self._lessons.direct, self._mixed(_THOUGHTS))])
            if number % _LOOK:
                continue
            loss = measure_loss(network, self._layout, tests)
            if loss < best - _LEAST_FALL:
                best, best_at, kept = loss, number, copy.deepcopy(network.state_dict())
            if number % (10 * _LOOK) == 0:
                self._progress.say(
                    f"warm start: {number} updates, {loss:.3f} nats per token of held-out answers"
                )
            if number - best_at >= _PATIENCE * _LOOK:
                break
        network.load_state_dict(kept)
        return replace(self._measure(best_at, shows_chains=False), loss=best)

    def _mixed(self, count: int) -> list[Example]:
        return draw_mixed(self._task, self._random, count)

    def _easiest(self, count: int) -> list[Example]:
        level = self._task.levels[0]
        return [draw(self._task, self._random, level, held_out=False) for _ in range(count)]

    def _random_thoughts(self) -> list[Lesson]:
        """Return random thoughts, mostly on the easiest questions, where single steps are learned."""
        shown = (*self._easiest(_EASY_THOUGHTS), *self._mixed(_THOUGHTS - _EASY_THOUGHTS))
        return [self._lessons.random(one, self._section.thought_tokens - 1) for one in shown]

    def _direct(self) -> list[Lesson]:
        """Return direct answers, often to the easiest questions, where single steps are learned."""
        easiest = self._easiest(_EASY)
        return [self._lessons.direct(one) for one in (*self._mixed(_DIRECT - _EASY), *easiest)]

    def _bad_thought(self, example: Example) -> Lesson:
        section = self._section
        if section.start == "random":
            return self._lessons.random(example, section.thought_tokens - 1)
        if section.start == "empty" and self._random.random() < section.empty_share:
            return self._lessons.empty(example)
        return self._lessons.corrupted(example, section.wrong_steps, section.thought_tokens)

    def _measure(self, updates: int, *, shows_chains: bool) -> Started:
        model, task, layout = ThinkingModel(self._network, self._layout), self._task, self._layout
        easiest = draw_tests(task, 1, _TESTED, task.levels[0])
        answered = model.answered(model.questions(easiest), None, model.answers(easiest))
        steps = right_steps(self._network, layout, draw_tests(task, 2, _TESTED)) if shows_chains else None
        return Started(updates=updates, right_steps=steps, right_answers=float(answered.is_right.mean()))


def _summary(started: Started) -> str:
    steps = "" if started.right_steps is None else f"{started.right_steps:.3f} of the steps and "
    return f"{steps}{started.right_answers:.3f} of the easiest answers are right"


@torch.no_grad()
def right_steps(network: Any, layout: Layout, examples: Sequence[Example]) -> float:
    """Return the share of steps of legal thoughts whose likeliest token is right; 1 where none has a step."""
    if not any(one.steps for one in examples):
        return 1.0
    rows = [layout.begun(layout.question(one.question), layout.ids(one.steps)) for one in examples]
    counts = [len(one.steps) for one in examples]
    found = outputs(network, rows, answer_places(rows, counts), layout.pad).log_probs.argmax(1)
    wanted = torch.tensor([token for one in examples for token in layout.ids(one.steps)])
    return float((found == wanted).float().mean())


@torch.no_grad()
def measure_loss(network: Any, layout: Layout, lessons: Sequence[Lesson]) -> float:
    return float(_loss(network, layout, lessons))


def _loss(network: Any, layout: Layout, lessons: Sequence[Lesson]) -> Tensor:
    rows = [one.ids for one in lessons]
    counts = [len(one.ids) - one.start for one in lessons]
    found = outputs(network, rows, answer_places(rows, counts), layout.pad)
    wanted = torch.tensor([token for one in lessons for token in one.ids[one.start :]])
    return functional.nll_loss(found.log_probs, wanted)


# ---- A Llama of some 0.1 million parameters that reads one task.

_SPREAD: Final = 0.2
"""Of the first weights: with the usual 0.02 hops are learned in twice the updates, or not at all."""
_HEAD_WIDTH: Final = 16
_POSITIONS: Final = 128


def build_transformer(layout: Layout, *, seed: int, hidden: int = 64, layers: int = 2) -> Any:
    """Return a LlamaForCausalLM in float32 with random weights and an output layer of its own."""
    torch.manual_seed(seed)
    # RoPE turns pairs of numbers: a head has an even number of them.
    widths = range(_HEAD_WIDTH, hidden, 2)
    heads = hidden // next((width for width in widths if hidden % width == 0), hidden)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=layout.vocabulary,
            hidden_size=hidden,
            intermediate_size=(hidden * 8 // 3 + 3) // 4 * 4,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=_POSITIONS,
            tie_word_embeddings=False,
            initializer_range=_SPREAD,
            pad_token_id=layout.pad,
            bos_token_id=layout.bos,
            eos_token_id=layout.end,
        )
    )


def load_transformer(folder: Path) -> Any:
    """Return the model of a folder, in float32 and ready to answer; raises ConfigurationError."""
    return make_network(LanguageSection(model=str(folder), lora=False), seed=0)


def save_transformer(model: Any, layout: Layout, folder: Path) -> None:
    tiny_models.save(model, tiny_models.build_tokenizer(layout.words), folder)


# ---- Before the processes of a run start: RUN/start_model/, the model that training begins with.

START_MODEL: Final = "start_model"
CARD: Final = "warm_start.json"
_GUARD_FILES: Final = ("guard_rules", "guard_classifier")


def prepare(settings: Settings, run_dir: Path, progress: Progress) -> Settings:
    """Return the settings with the path of the start model, which is made where none is named.

    Raises ConfigurationError, and Interrupted.
    """
    quieten()
    section = thoughts_section(settings.environment)
    if settings.learner.device == "cuda":
        raise ConfigurationError("learner.device='cuda': thoughts are learned on the CPU; say cpu")
    check_lengths(settings)
    mixing_width(settings.policy)
    # Only a server uses them; files that cannot be used are refused before the model is made.
    read_guard_files(section)
    folder = run_dir / START_MODEL
    model = section.model or str(
        make_start(
            settings.environment, folder, progress, seed=settings.seed, threads=settings.learner.threads
        )
    )
    check_words(model, settings.environment)
    place = str(Path(model).absolute())
    kwargs = {
        **settings.environment.kwargs,
        "model": place,
        "task": section.task,
        # A server may have another working folder.
        **{key: str(Path(file).absolute()) for key in _GUARD_FILES if (file := getattr(section, key))},
    }
    policy = {"lora": False, **settings.policy.kwargs, "model": place}
    return settings.model_copy(
        update={
            "environment": settings.environment.model_copy(update={"kwargs": kwargs}),
            "policy": settings.policy.model_copy(update={"kwargs": policy}),
        }
    )


def check_words(model: str, environment: EnvironmentSection) -> None:
    """Raise ConfigurationError where there is no model, or one whose tokens are another task's words."""
    if not (Path(model) / "tokenizer.json").exists():
        raise ConfigurationError(
            f"environment.kwargs.model={model!r}: no such folder, or none with a tokenizer.json; name one "
            "with a model of this task, or leave it out, and one is made"
        )
    known = load_tokenizer(model).get_vocab()
    layout = task_of(environment)[1]
    if sorted(known, key=known.__getitem__) != list(layout.text(range(layout.vocabulary))):
        raise ConfigurationError(
            f"environment.kwargs.model={model!r}: its words are not those of "
            f"environment.kwargs.task={thoughts_section(environment).task!r}; name a model of this task, or "
            "leave it out and remove the folder, and one is made"
        )


def make_start(
    environment: EnvironmentSection, folder: Path, progress: Progress, *, seed: int, threads: int
) -> Path:
    """Make the model that a run begins with in a folder, unless it is there; return its absolute path."""
    if folder.is_dir():
        return folder.absolute()
    section = thoughts_section(environment)
    task, layout = task_of(environment)
    # With more threads than free cores, threads wait for each other at every small matrix product.
    torch.set_num_threads(threads)
    progress.say(f"preparing: a model that knows single steps of {section.task}, in {folder}")
    network = build_transformer(layout, seed=seed, hidden=section.hidden, layers=section.layers)
    started = warm_start(network, task, layout, section, seed=seed, progress=progress)
    with whole_folder(folder) as temporary:
        temporary.mkdir(parents=True)
        save_transformer(network, layout, temporary)
        (temporary / CARD).write_text(json.dumps(asdict(started)) + "\n")
    return folder.absolute()


def check_lengths(settings: Settings) -> None:
    """Raise ConfigurationError where rows or groups do not fit, or no thought would have an advantage."""
    section, count = thoughts_section(settings.environment), settings.environment.count
    if count % section.group:
        raise ConfigurationError(
            f"environment.kwargs.group={section.group}: environment.count={count} is no multiple of it"
        )
    baseline = getattr(settings.algorithm, "baseline", "none")
    if section.group == 1 and baseline in ("group", "both"):
        raise ConfigurationError(
            "environment.kwargs.group=1: the only thought on a question equals the mean of "
            f"algorithm.baseline={baseline!r}, and nothing is learned; give 2 or more, or another baseline"
        )
    if section.group == count and getattr(settings.algorithm, "reward_from", "own") == "another":
        raise ConfigurationError(
            f"environment.count={count}: a fragment has a single question, and "
            "algorithm.reward_from='another' gives each thought the reward of another; give twice "
            f"environment.kwargs.group={section.group} or more"
        )
    steps, row = most_tokens(settings.environment)
    if section.thought_tokens < steps:
        raise ConfigurationError(
            f"environment.kwargs.thought_tokens={section.thought_tokens}: a legal thought of "
            f"environment.kwargs.task={section.task!r} has up to {steps} steps; give as many, and one "
            "for the mark that ends it"
        )
    if settings.actor.unroll_length < row - 1:
        raise ConfigurationError(
            f"actor.unroll_length={settings.actor.unroll_length}: a question of "
            f"environment.kwargs.task={section.task!r} with a thought and its answer needs {row - 1}"
        )
