"""`penstock thoughts check RUN`: the validation of what a run has learned, on questions of its own."""

import json
import sys
from pathlib import Path

from penstock.config.configuration_error import ConfigurationError
from penstock.config.run_folder import CONFIG_FILE
from penstock.config.service_settings import local_settings
from penstock.runtime.exit import EXIT_FAILED, EXIT_OK
from workloads.language.quiet import quieten
from workloads.thoughts.commands.condition_runs import final_network, losses_of_start, start_of
from workloads.thoughts.tasks.example import draw_tests
from workloads.thoughts.thinking_model import ThinkingModel
from workloads.thoughts.thought_environment import task_of
from workloads.thoughts.thought_section import thoughts_section
from workloads.thoughts.validation.probes import probe
from workloads.thoughts.validation.theatre import Validation, validate

_SEED = 4_000_000


def main(run: Path, *, questions: int, deterministic: bool, trust: bool, as_json: bool) -> int:
    """Print the verdict and its reasons; returns 1 for theatre.

    Raises ConfigurationError for a folder without a run of thoughts that has ended.
    """
    found = check_run(run, questions=questions, deterministic=deterministic, trust=trust)
    text = json.dumps(found.json()) if as_json else "\n".join(found.words())
    sys.stdout.write(f"{text}\n")
    return EXIT_FAILED if found.verdict == "theatre" else EXIT_OK


def check_run(run: Path, *, questions: int, deterministic: bool = False, trust: bool = False) -> Validation:
    """Return the validation of a run's final policy; raises ConfigurationError.

    deterministic: of its likeliest thoughts. trust: the folder although it was not made here.
    """
    quieten()
    if not (run / CONFIG_FILE).exists():  # such a folder has the defaults, which are of another workload
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
    examples = draw_tests(task, _SEED, questions)
    probed = probe(model, task, examples, section.thought_tokens, deterministic=deterministic)
    return validate(
        probed,
        start_losses=losses_of_start(start, layout, examples),
        most_gain=getattr(task, "most_gain", None),
    )
