"""`penstock thoughts conditions RECIPE`: seven conditions, seed by seed, as table, pictures and verdicts."""

import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from penstock.config.configuration_error import ConfigurationError
from penstock.config.service_settings import over_defaults
from penstock.runtime.exit import EXIT_FAILED, EXIT_OK, Fatal
from penstock.training import TrainingFailed
from workloads.thoughts.commands.condition_gates import gates, hold
from workloads.thoughts.commands.conditions import ALL, NAMES, Plan, run_seed
from workloads.thoughts.commands.conditions_table import write_results
from workloads.thoughts.commands.plan_file import hold_plan
from workloads.thoughts.start.thoughts_start import check_lengths

_ANOTHER: Final = 7
"""The condition that learns from the reward of another question."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the command was asked for; fields as its options."""

    recipe: Path
    out: Path
    seeds: int
    updates: int
    questions: int
    only: tuple[int, ...]
    all_gates: bool = False


def main(asked: Asked) -> int:
    """Run all conditions of all seeds, write the files and print the table.

    Returns 1 where a condition that must fail is not called theatre, or where any gate does not hold if all
    are asked for. Raises ConfigurationError for a recipe
    that cannot be read or is none of thoughts, Fatal for a run that failed.
    """
    torch.set_num_threads(1)
    plan = make_plan(asked)
    hold_plan(plan.out, {"recipe": plan.recipe, "updates": plan.updates, "questions": plan.questions})
    try:
        results = {seed: run_seed(plan, seed) for seed in range(asked.seeds)}
    except TrainingFailed as error:
        raise Fatal(f"{asked.recipe}: a run failed: {error}") from error
    sys.stdout.write("\n".join(write_results(results, NAMES, asked.out)) + "\n")
    return EXIT_OK if hold(gates(results), all_of_them=asked.all_gates) else EXIT_FAILED


def make_plan(asked: Asked) -> Plan:
    """Return what is to be compared; raises ConfigurationError."""
    try:
        recipe = tomllib.loads(asked.recipe.read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{asked.recipe}: cannot be read as a recipe: {error}") from error
    if recipe.get("workload") != "thoughts":
        raise ConfigurationError(
            f"{asked.recipe}: workload={recipe.get('workload')!r}; name a recipe of thoughts, such as "
            "recipes/thoughts-tiny.toml"
        )
    _check_numbers(asked.only)
    _check_recipe(asked.recipe, recipe, asked.only or ALL)
    return Plan(
        recipe=recipe,
        out=asked.out.absolute(),
        updates=asked.updates or int(recipe.get("learner", {}).get("total_updates", 400)),
        questions=asked.questions,
        conditions=asked.only or ALL,
        say=_say,
    )


def _check_recipe(file: Path, recipe: dict[str, Any], conditions: Sequence[int]) -> None:
    """Refuse what would fail when the first run begins, after what is made before it."""
    try:
        check_lengths(over_defaults([recipe]))
        another = {**recipe, "algorithm": {**recipe.get("algorithm", {}), "reward_from": "another"}}
        if _ANOTHER in conditions:
            check_lengths(over_defaults([another]))
    except (ConfigurationError, ValueError) as error:
        raise ConfigurationError(f"{file}: {error}") from error


def _check_numbers(only: Sequence[int]) -> None:
    unknown = sorted(set(only) - set(ALL))
    if unknown:
        raise ConfigurationError(f"--only {unknown[0]}: conditions have the numbers 1 to {max(ALL)}")


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
