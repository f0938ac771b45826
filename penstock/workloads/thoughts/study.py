"""`penstock thoughts study RECIPE`, which compares conditions, and `penstock thoughts check RUN`.

All conditions have the same start model and the same questions. Each varied setting is one more condition 5.
The result of each condition is kept in `seed-N/condition-NAME.json`: an interrupted study continues with the
others.
"""

import copy
import json
import sys
import threading
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import tomli_w
import torch

from penstock.config.configuration_error import ConfigurationError
from penstock.config.run_folder import CONFIG_FILE
from penstock.config.service_settings import local_settings, over_defaults
from penstock.config.settings import EnvironmentSection, PolicySection, Progress, parse_assignment
from penstock.policy.weights import load_into
from penstock.runtime.exit import EXIT_FAILED, EXIT_OK, Fatal
from penstock.runtime.output_file import replace_file
from penstock.training import TrainingConfig, TrainingFailed, lay_over, resume, start
from penstock.workloads.language.settings import quieten
from penstock.workloads.plugin.serving import read_final
from penstock.workloads.thoughts.environment import Layout, Thoughts, task_of, thoughts_section
from penstock.workloads.thoughts.model import ThinkingModel, build
from penstock.workloads.thoughts.start import (
    START_MODEL,
    Lesson,
    Lessons,
    Teacher,
    check_lengths,
    check_words,
    load_transformer,
    make_start,
)
from penstock.workloads.thoughts.tasks import Example, Task, draw_mixed, draw_tests
from penstock.workloads.thoughts.thought_commands import StudyOptions
from penstock.workloads.thoughts.validation import Probed, Validation, probe, validate

NAMES: Final = {
    1: "direct answers",
    2: "direct answers, as much compute",  # as with thoughts
    3: "filler",  # thoughts of as many filler words
    4: "start, untrained",
    5: "REINFORCE",
    6: "taught chains",  # legal thoughts by cross-entropy: the ceiling
    7: "REINFORCE, another's reward",
}
_WITHOUT_THOUGHTS: Final = (1, 2)
_MUST_FAIL: Final = (3, 7)
_REINFORCED: Final = 5
_ANOTHER: Final = 7
_ROWS: Final = 160
_DIRECT_ROWS: Final = 32
_TAUGHT_ROWS: Final = 80
_TESTS_SEED: Final = 3_000_000
_HEADER: Final = (
    "| condition | right | right, likeliest thoughts | gain, nats | without, nats | legal chains | coherence "
    "| verdict |"
)
_JUDGED: Final = ("gain", "direct_loss", "chains", "coherence")
"""Figures of the validation in the table, from the column of the gain on."""

Result = Mapping[str, Any]
"""Of a condition and seed, as `_measure` returns it."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition. number: key of NAMES. setting: KEY=VALUE that overrides the recipe; "": none."""

    number: int
    setting: str = ""

    @property
    def name(self) -> str:
        return f"{self.number}-{self.setting}" if self.setting else str(self.number)

    def over(self, recipe: Mapping[str, Any]) -> dict[str, Any]:
        """Return the recipe with the changes of this condition; raises ConfigurationError."""
        changed = copy.deepcopy(dict(recipe))
        if self.setting:
            lay_over(changed, parse_assignment(self.setting))
        if self.number == _ANOTHER:
            lay_over(changed, {"algorithm": {"reward_from": "another"}})
        return changed


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A comparison of conditions. questions: for measurements of each."""

    recipe: Mapping[str, Any]
    out: Path
    seeds: int
    updates: int
    questions: int
    conditions: tuple[Condition, ...]


@dataclass(frozen=True, slots=True)
class _Place:
    """A seed's folder, the task, and the start model. most: tokens of a thought."""

    folder: Path
    task: Task
    layout: Layout
    start: Path
    most: int


def make_study(options: StudyOptions) -> Study:
    """Return a study; raises ConfigurationError for mistakes that would fail only hours later."""
    file = options.recipe
    try:
        recipe = tomllib.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{file}: cannot be read as a recipe: {error}") from error
    if recipe.get("workload") != "thoughts":
        raise ConfigurationError(
            f"{file}: workload={recipe.get('workload')!r}; name a recipe of thoughts, such as "
            "penstock/recipes/thoughts-tiny.toml"
        )
    unknown = sorted(set(options.only) - set(NAMES))
    if unknown:
        raise ConfigurationError(f"--only {unknown[0]}: conditions have the numbers 1 to {max(NAMES)}")
    conditions = [Condition(number) for number in (sorted(set(options.only)) or NAMES)]
    conditions += [Condition(_REINFORCED, setting) for setting in options.vary]
    for condition in conditions:
        _check(file, recipe, condition)
    return Study(
        recipe=recipe,
        out=options.out.absolute(),
        seeds=options.seeds,
        updates=options.updates or int(recipe.get("learner", {}).get("total_updates", 400)),
        questions=options.questions,
        conditions=tuple(conditions),
    )


def _check(file: Path, recipe: Mapping[str, Any], condition: Condition) -> None:
    if Path(condition.name).name != condition.name:
        raise ConfigurationError(
            f"--vary {condition.setting}: settings name folders of runs, and this is no name of a folder; "
            "write the value into a copy of the recipe"
        )
    try:
        over_defaults([recipe])  # before a setting overrides a section that is none
        check_lengths(over_defaults([condition.over(recipe)]))
    except (ConfigurationError, ValueError) as error:
        varied = f" with {condition.setting}" if condition.setting else ""
        raise ConfigurationError(f"{file}{varied}: {error}") from error


def main(study: Study) -> int:
    """Make the missing results, write `table.md` and print the table.

    Returns 1 where the verdict on a condition that must fail is not theatre.
    """
    quieten()
    torch.set_num_threads(1)
    _write_plan(study)
    results: dict[Condition, list[Result]] = {condition: [] for condition in study.conditions}
    for seed in range(study.seeds):
        for condition, found in results.items():
            found.append(_result(study, condition, seed))
    lines = table(results)
    (study.out / "table.md").write_text("\n".join(lines) + "\n")
    sys.stdout.write("\n".join(lines) + "\n")
    return EXIT_OK if have_failed(results) else EXIT_FAILED


def have_failed(results: Mapping[Condition, Sequence[Result]]) -> bool:
    return all(
        one["validation"]["verdict"] == "theatre"
        for condition, found in results.items()
        if condition.number in _MUST_FAIL
        for one in found
    )


def _write_plan(study: Study) -> None:
    """Write the plan of the folder; raises ConfigurationError where its results are of another plan."""
    plan = {"recipe": study.recipe, "updates": study.updates, "questions": study.questions}
    file = study.out / "plan.json"
    there = json.loads(file.read_text()) if file.exists() else plan
    differing = [key for key, value in plan.items() if there.get(key) != value]
    if differing:
        raise ConfigurationError(
            f"--out {study.out}: its results were made with another {', '.join(differing)} ({file}); name "
            "another folder, or repeat the same command"
        )
    study.out.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(plan) + "\n")


def _result(study: Study, condition: Condition, seed: int) -> Result:
    folder = study.out / f"seed-{seed}"
    file = folder / f"condition-{condition.name}.json"
    if not file.exists():
        _write_line(f"seed {seed}, condition {condition.name}: {NAMES[condition.number]}")
        place = _place(study, condition, folder, seed)
        found = _measure(_network(study, condition, place, seed), place, study.questions, condition)
        line = json.dumps({"condition": condition.name, "seed": seed, **found}) + "\n"
        replace_file(file, line.encode())
    return dict(json.loads(file.read_text()))


def _place(study: Study, condition: Condition, folder: Path, seed: int) -> _Place:
    """Return the place of a condition. One that varies the environment has its own start model."""
    recipe = condition.over(study.recipe)
    environment = EnvironmentSection.model_validate(recipe["environment"])
    section = thoughts_section(environment)
    has_own = recipe["environment"] != study.recipe["environment"]
    start_folder = folder / (f"{START_MODEL}-{condition.name}" if has_own else START_MODEL)
    folder.mkdir(parents=True, exist_ok=True)
    progress = Progress(_write_line, threading.Event())
    model = (
        Path(section.model).absolute()
        if section.model
        else make_start(environment, start_folder, progress, seed=seed, threads=1)
    )
    check_words(str(model), environment)
    return _Place(folder, *task_of(environment), model, section.thought_tokens)


def _network(study: Study, condition: Condition, place: _Place, seed: int) -> Any:
    number = condition.number
    if number in (_REINFORCED, _ANOTHER):
        run_dir = place.folder / f"run-{condition.name}"
        over = {
            "seed": seed,
            "environment": {"kwargs": {"model": str(place.start)}},
            "learner": {"total_updates": study.updates},
        }
        train_thoughts(condition.over(study.recipe), run_dir, over)
        return final_network(run_dir, place.start)
    network = load_transformer(place.start)
    if number == 4:
        return network
    updates = study.updates * (1 + place.most) if number == 2 else study.updates
    random = np.random.default_rng(seed + 1)
    lessons = Lessons(place.task, place.layout, random)
    teacher = Teacher(network, place.layout, learning_rate=1e-3)
    for _ in range(updates):
        teacher.teach(_lessons(lessons, place, random, number))
    return network.eval()


def train_thoughts(recipe: dict[str, Any], run_dir: Path, over: Mapping[str, Any]) -> None:
    """Train thoughts by a recipe and settings that override it, in a run with all its processes.

    A run that is complete is not repeated, and an interrupted one continues. A KeyboardInterrupt ends it with
    a checkpoint first. Raises Fatal.
    """
    summary = run_dir / "summary.json"
    found = json.loads(summary.read_text()) if summary.exists() else {"interrupted": True}
    if not found["interrupted"] and "failure" not in found:
        return
    lay_over(recipe, over)
    run_dir.mkdir(parents=True, exist_ok=True)
    # Not `with_suffix`: it makes the same name of 0.01 and 0.02.
    file = run_dir.with_name(f"{run_dir.name}.toml")
    file.write_text(tomli_w.dumps(recipe))
    is_begun = (run_dir / CONFIG_FILE).exists()
    job = resume(run_dir) if is_begun else start(TrainingConfig(file, run_dir=run_dir))
    try:
        job.result()
    except KeyboardInterrupt:
        job.stop()
        job.result()
        raise
    except TrainingFailed as error:
        raise Fatal(f"{run_dir}: {error}") from error


def _lessons(lessons: Lessons, place: _Place, random: np.random.Generator, number: int) -> list[Lesson]:
    task = place.task
    if number in _WITHOUT_THOUGHTS:
        return [lessons.direct(one) for one in draw_mixed(task, random, _ROWS)]
    of: Callable[[Example], Lesson] = (
        partial(lessons.filler, most=place.most - 1) if number == 3 else lessons.chain
    )
    shown = [of(one) for one in draw_mixed(task, random, _TAUGHT_ROWS - _DIRECT_ROWS)]
    return [*shown, *(lessons.direct(one) for one in draw_mixed(task, random, _DIRECT_ROWS))]


def _measure(network: Any, place: _Place, questions: int, condition: Condition) -> dict[str, Any]:
    model, task = ThinkingModel(network, place.layout), place.task
    examples = draw_tests(task, _TESTS_SEED, questions)
    probed = probe(model, task, examples, place.most)
    greedy = probe(model, task, examples, place.most, deterministic=True)
    found = judged(probed, task, place.layout, place.start, examples)
    is_direct = condition.number in _WITHOUT_THOUGHTS
    right, likeliest = (
        (one.without if is_direct else one.with_thought).is_right.mean() for one in (probed, greedy)
    )
    return {
        "accuracy": float(right),
        "greedy": float(likeliest),
        "validation": found.json(),
    }


def table(results: Mapping[Condition, Sequence[Result]]) -> list[str]:
    lines = [_HEADER, "|---" * (_HEADER.count("|") - 1) + "|"]
    for condition, found in results.items():
        validations = [one["validation"] for one in found]
        cells = [
            f"{condition.number} {NAMES[condition.number]}{condition.setting and f', {condition.setting}'}",
            _each(one["accuracy"] for one in found),
            _each(one["greedy"] for one in found),
        ]
        if condition.number in _WITHOUT_THOUGHTS:
            cells += ["–", _each(one["direct_loss"] for one in validations), "–", "–", "–"]
        else:
            cells += [_each(one[name] for one in validations) for name in _JUDGED]
            cells.append(", ".join(one["verdict"] for one in validations))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _each(numbers: Iterable[float]) -> str:
    return " ".join(f"{number:.2f}" for number in numbers)


def _write_line(line: str) -> None:
    sys.stderr.write(f"{line}\n")


# ---- `penstock thoughts check RUN`: the validation of a run's final policy, on further questions.

_CHECKS_SEED: Final = 4_000_000


def check_run(run: Path, *, questions: int, deterministic: bool = False, trust: bool = False) -> Validation:
    """Return the validation of a run's final policy. deterministic: with its likeliest thoughts."""
    quieten()
    if not (run / CONFIG_FILE).exists():  # `local_settings` would return the defaults of another workload
        raise ConfigurationError(
            f"{run}: holds no {CONFIG_FILE}, so no run; name the folder of a run of thoughts"
        )
    settings = local_settings(run, trust=trust)
    if settings.workload != "thoughts":
        raise ConfigurationError(f"{run}: its workload is {settings.workload!r}; name a run of thoughts")
    environment = settings.environment
    task, layout = task_of(environment)
    section = thoughts_section(environment)
    start = start_of(run, section)
    try:
        network = final_network(run, start)
    except ValueError as error:
        raise ConfigurationError(f"{run}: {error}") from error
    model = ThinkingModel(network, layout)
    examples = draw_tests(task, _CHECKS_SEED, questions)
    probed = probe(model, task, examples, section.thought_tokens, deterministic=deterministic)
    return judged(probed, task, layout, start, examples)


def start_of(run_dir: Path, section: Thoughts) -> Path:
    """Return the model that a run began with: its own, wherever its folder is now, or the named one."""
    own = run_dir / START_MODEL
    return own if own.is_dir() else Path(section.model)


def final_network(run_dir: Path, model: Path) -> Any:
    """Return the network of a run's final policy. model: its start model. Raises ValueError."""
    final = read_final(run_dir)
    specification = final.specification
    section = PolicySection.model_validate_json(specification.policy_json)
    section = section.model_copy(update={"kwargs": {**section.kwargs, "model": str(model)}})
    policy = build(specification.observation_space, specification.action_space, section, 0)
    load_into(policy, final.blob)
    return policy.network


def judged(
    probed: Probed, task: Task, layout: Layout, model: Path, examples: Sequence[Example]
) -> Validation:
    """Return the validation of measurements, compared with those of the start model."""
    start = ThinkingModel(load_transformer(model), layout)
    answered = start.answered(start.questions(examples), None, start.answers(examples))
    return validate(probed, start_losses=-answered.log_prob, most_gain=getattr(task, "most_gain", None))
