"""`penstock thoughts vary RECIPE KEY VALUE…`: an ablation, a run for each value and seed.

OUT/start-N/            the model that all runs of a seed begin with
OUT/start-VALUE-N/      the same where it depends on what is varied
OUT/VALUE-N/            a run
OUT/table.md            what each came to
OUT/vary.png            gain over updates, by value
"""

import copy
import json
import sys
import threading
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from penstock.config.configuration_error import ConfigurationError
from penstock.config.preparation import Progress
from penstock.config.service_settings import over_defaults
from penstock.config.settings import EnvironmentSection
from penstock.runtime.exit import EXIT_OK, Fatal
from penstock.training import TrainingFailed, lay_over
from workloads.language.quiet import quieten
from workloads.thoughts.commands.condition_runs import RunSettings, train_thoughts
from workloads.thoughts.commands.conditions_table import draw_lines, read_curve
from workloads.thoughts.commands.plan_file import hold_plan
from workloads.thoughts.start.thoughts_start import check_lengths, make_start
from workloads.thoughts.thought_section import thoughts_section

_COLUMNS = (
    "value",
    "right",
    "right, likeliest thoughts",
    "gain, nats",
    "without, nats",
    "verdict",
    "failed tests",
    "updates",
    "ended by",
    "best restored",
)

_OF_THE_START: Final = "environment.kwargs."
_OF_RUNS: Final = ("environment.kwargs.group",)
"""Those of them that the start does not depend on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variation:
    """What is varied. key: such as algorithm.baseline. values: as `--set` takes them. updates: of a run."""

    recipe: Path
    key: str
    values: tuple[str, ...]
    out: Path
    seeds: int
    updates: int


def main(varied: Variation) -> int:
    """Make the runs, write table and picture, and print the table.

    Raises ConfigurationError for a recipe that cannot be read and for a value that no run takes, before
    anything is made, Fatal for a run that failed.
    """
    quieten()
    torch.set_num_threads(1)
    recipe = _recipe(varied.recipe)
    for value in varied.values:
        _check(recipe, varied, value)
    updates = varied.updates or int(recipe.get("learner", {}).get("total_updates", 400))
    out = varied.out.absolute()
    hold_plan(out, {"recipe": recipe, "key": varied.key, "updates": updates})
    lines = [f"| {' | '.join(_COLUMNS)} |", "|" + "---|" * len(_COLUMNS)]
    curves = []
    for value in varied.values:
        summaries = []
        for seed in range(varied.seeds):
            run_dir = out / f"{value}-{seed}"
            settings = RunSettings(seed=seed, updates=updates, more=nested(varied.key, parsed(value)))
            summaries.append(_trained(recipe, _start(recipe, varied, value, seed), run_dir, settings))
            curves.append((value, read_curve(run_dir / "metrics.jsonl")))
        lines.append(_row(value, summaries))
    (out / "table.md").write_text(f"{varied.key}\n\n" + "\n".join(lines) + "\n")
    draw_lines(curves, f"gain of a thought, nats,\nby {varied.key}", out / "vary.png")
    sys.stdout.write("\n".join(lines) + "\n")
    return EXIT_OK


def parsed(value: str) -> Any:
    """Return a value as TOML says it, or as a text where it is none."""
    try:
        return tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return value


def nested(key: str, value: Any) -> dict[str, Any]:
    """Return a value under its dotted key, as tables in tables."""
    found = value
    for part in reversed(key.split(".")):
        found = {part: found}
    return dict(found)


def _check(recipe: dict[str, Any], varied: Variation, value: str) -> None:
    """Refuse a value that would fail when its turn comes, which may be hours from now."""
    if Path(value).name != value:
        raise ConfigurationError(
            f"{varied.key}={value}: is no name of a folder, and runs are called by values"
        )
    said = copy.deepcopy(recipe)
    try:
        over_defaults([said])
        lay_over(said, nested(varied.key, parsed(value)))
        check_lengths(over_defaults([said]))
    except ConfigurationError as error:
        raise ConfigurationError(f"{varied.recipe} with {varied.key}={value}: {error}") from error


def _recipe(file: Path) -> dict[str, Any]:
    try:
        recipe = tomllib.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{file}: cannot be read as a recipe: {error}") from error
    if recipe.get("workload") != "thoughts":
        raise ConfigurationError(f"{file}: workload={recipe.get('workload')!r}; name a recipe of thoughts")
    return recipe


def _start(recipe: dict[str, Any], varied: Variation, value: str, seed: int) -> Path:
    """Return the model that all runs of a seed begin with; of a value, where it depends on that."""
    said = copy.deepcopy(recipe)
    depends = varied.key.startswith(_OF_THE_START) and varied.key not in _OF_RUNS
    if depends:
        lay_over(said, nested(varied.key, parsed(value)))
    environment = EnvironmentSection.model_validate(said["environment"])
    named = thoughts_section(environment).model
    if named:
        return Path(named).absolute()
    folder = varied.out.absolute() / (f"start-{value}-{seed}" if depends else f"start-{seed}")
    return make_start(environment, folder, Progress(_say, threading.Event()), seed=seed, threads=1)


def _trained(recipe: dict[str, Any], model: Path, run_dir: Path, settings: RunSettings) -> dict[str, Any]:
    _say(f"{run_dir.name}: {settings.updates} updates")
    try:
        return train_thoughts(recipe, model, run_dir, settings)
    except TrainingFailed as error:
        raise Fatal(f"{run_dir}: {error}") from error


def _row(value: str, summaries: Sequence[dict[str, Any]]) -> str:
    """Return the row of a value, a figure a seed within each cell."""
    found = [one.get("theatre") or {} for one in summaries]
    evaluated = [one.get("evaluation") or {} for one in summaries]
    failed = {test["name"] for one in found for test in one.get("tests", ()) if test["passed"] is False}
    cells = (
        value,
        _each((one.get("sampled") or {}).get("mean") for one in evaluated),
        _each((one.get("deterministic") or {}).get("mean") for one in evaluated),
        _each(one.get("gain") for one in found),
        _each(one.get("direct_loss") for one in found),
        ", ".join(str(one.get("verdict", "–")) for one in found),
        ", ".join(sorted(failed)) or "–",
        " ".join(json.dumps(one.get("updates")) for one in summaries),
        ", ".join(str(one.get("ending", "–")) for one in summaries),
        ", ".join("yes" if one.get("restored_from") else "no" for one in summaries),
    )
    return f"| {' | '.join(cells)} |"


def _each(values: Iterable[float | None]) -> str:
    return " ".join(map(_number, values))


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
