"""The seven conditions of one seed, all from the same start and measured on the same held-out questions.

    1 direct       no thoughts, as many updates
    2 compute      no thoughts, as much compute as thoughts take
    3 filler       a thought of as many words that say nothing
    4 start        thoughts that were never trained: the warm start alone
    5 reinforce    thoughts by REINFORCE, by a run with all its processes
    6 chains       legal thoughts taught by cross-entropy: the ceiling
    7 another      REINFORCE on another question's reward, which must fail

What one came to is written to `condition-N.json` below the seed's folder and kept: a command that was
interrupted goes on with the others.
"""

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from penstock.config.preparation import Progress
from penstock.config.settings import EnvironmentSection
from workloads.language.quiet import quieten
from workloads.thoughts.commands.condition_runs import (
    RunSettings,
    final_network,
    losses_of_start,
    train_thoughts,
)
from workloads.thoughts.start.lessons import Lesson, Lessons
from workloads.thoughts.start.thoughts_start import START_MODEL, check_words, make_start
from workloads.thoughts.start.transformer import load_transformer
from workloads.thoughts.start.warm_start import Teacher
from workloads.thoughts.tasks.example import Example, Task, draw_mixed, draw_tests
from workloads.thoughts.thinking_model import ThinkingModel
from workloads.thoughts.thought_environment import task_of
from workloads.thoughts.thought_layout import Layout
from workloads.thoughts.thought_section import thoughts_section
from workloads.thoughts.validation.probes import probe
from workloads.thoughts.validation.theatre import validate

NAMES: Final = {
    1: "direct answers",
    2: "direct answers, as much compute",
    3: "filler",
    4: "start, untrained",
    5: "REINFORCE",
    6: "taught chains",
    7: "REINFORCE, another's reward",
}
ALL: Final = tuple(NAMES)
_ROWS: Final = 160
_DIRECT_ROWS: Final = 32
_TAUGHT_ROWS: Final = 80
_TESTS_SEED: Final = 3_000_000
_WITHOUT_THOUGHTS: Final = (1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is compared. recipe: as TOML says it. questions: that each condition is measured on."""

    recipe: dict[str, Any]
    out: Path
    updates: int
    questions: int
    conditions: tuple[int, ...] = ALL
    say: Callable[[str], None] = print

    @property
    def environment(self) -> EnvironmentSection:
        """Return the environment of the recipe."""
        return EnvironmentSection.model_validate(self.recipe["environment"])


@dataclass(frozen=True, slots=True)
class _Place:
    """A seed's folder, the task, and the model that all conditions begin with."""

    folder: Path
    task: Task
    layout: Layout
    start: Path
    most: int


def run_seed(plan: Plan, seed: int) -> dict[int, dict[str, Any]]:
    """Return what every condition of a seed came to, by number; makes those that are missing.

    Raises ConfigurationError, and TrainingFailed where a run fails.
    """
    quieten()
    folder = plan.out / f"seed-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    progress = Progress(plan.say, threading.Event())
    task, layout = task_of(plan.environment)
    section = thoughts_section(plan.environment)
    start = (
        Path(section.model).absolute()
        if section.model
        else make_start(plan.environment, folder / START_MODEL, progress, seed=seed, threads=1)
    )
    check_words(str(start), plan.environment)
    place = _Place(folder, task, layout, start, section.thought_tokens)
    return {number: _kept(plan, place, seed, number) for number in plan.conditions}


def _kept(plan: Plan, place: _Place, seed: int, number: int) -> dict[str, Any]:
    file = place.folder / f"condition-{number}.json"
    if not file.exists():
        plan.say(f"seed {seed}, condition {number}: {NAMES[number]}")
        found = _measured(_network(plan, place, seed, number), place, plan.questions, number)
        temporary = file.with_suffix(".tmp")
        temporary.write_text(json.dumps({"condition": number, "seed": seed, **found}) + "\n")
        temporary.replace(file)
    return dict(json.loads(file.read_text()))


def _network(plan: Plan, place: _Place, seed: int, number: int) -> Any:
    """Return the trained network of a condition."""
    if number in (5, 7):
        run_dir = place.folder / f"run-{number}"
        another = "another" if number == 7 else "own"
        settings = RunSettings(seed=seed, updates=plan.updates, reward_from=another)
        train_thoughts(plan.recipe, place.start, run_dir, settings)
        return final_network(run_dir, place.start)
    network = load_transformer(place.start)
    if number == 4:
        return network
    updates = plan.updates * (1 + place.most) if number == 2 else plan.updates
    random = np.random.default_rng(seed + 1)
    lessons = Lessons(place.task, place.layout, random)
    teacher = Teacher(network, place.layout, learning_rate=1e-3)
    for _ in range(updates):
        teacher.teach(_lessons(lessons, place, random, number))
    return network.eval()


def _lessons(lessons: Lessons, place: _Place, random: np.random.Generator, number: int) -> list[Lesson]:
    """Return the rows of one update of a condition that is taught."""
    task = place.task
    if number in _WITHOUT_THOUGHTS:
        return [lessons.direct(one) for one in draw_mixed(task, random, _ROWS)]
    of: Callable[[Example], Lesson] = (
        partial(lessons.filler, most=place.most - 1) if number == 3 else lessons.chain
    )
    shown = [of(one) for one in draw_mixed(task, random, _TAUGHT_ROWS - _DIRECT_ROWS)]
    return [*shown, *(lessons.direct(one) for one in draw_mixed(task, random, _DIRECT_ROWS))]


def _measured(network: Any, place: _Place, questions: int, number: int) -> dict[str, Any]:
    """Return accuracy, gain and verdict of a network, and accuracy over levels."""
    model, task = ThinkingModel(network, place.layout), place.task
    examples = draw_tests(task, _TESTS_SEED, questions)
    probed = probe(model, task, examples, place.most)
    found = validate(
        probed,
        start_losses=losses_of_start(place.start, place.layout, examples),
        most_gain=getattr(task, "most_gain", None),
    )
    is_direct = number in _WITHOUT_THOUGHTS
    counted = probed.without if is_direct else probed.with_thought
    greedy = probe(model, task, examples, place.most, deterministic=True)
    return {
        "accuracy": float(counted.is_right.mean()),
        "greedy": float((greedy.without if is_direct else greedy.with_thought).is_right.mean()),
        "right": [int(one) for one in counted.is_right],
        "validation": asdict(found) | {"words": found.words()},
        "by_level": {
            str(level): _accuracy(model, draw_tests(task, _TESTS_SEED + level, questions // 4, level), place,
                                  thinks=not is_direct)
            for level in task.levels
        },
    }  # fmt: skip


def _accuracy(model: ThinkingModel, examples: Sequence[Example], place: _Place, *, thinks: bool) -> float:
    asked, answers = model.questions(examples), model.answers(examples)
    model.seed(_TESTS_SEED)
    thoughts = model.think(asked, place.most) if thinks else None
    return float(model.answered(asked, thoughts, answers).is_right.mean())
