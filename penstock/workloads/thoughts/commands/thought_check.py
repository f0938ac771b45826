"""`penstock thoughts check RUN`: the validation of what a run has learned, on questions of its own."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.config.configuration_error import ConfigurationError
from penstock.config.run_folder import CONFIG_FILE
from penstock.config.service_settings import local_settings
from penstock.config.settings import PolicySection
from penstock.policy.weights import load_into
from penstock.workloads.language.loading import quieten
from penstock.workloads.plugin.serving import read_final
from penstock.workloads.thoughts.environment import Layout, Thoughts, task_of, thoughts_section
from penstock.workloads.thoughts.model import ThinkingModel, build
from penstock.workloads.thoughts.start.thoughts_start import START_MODEL
from penstock.workloads.thoughts.start.warm_start import load_transformer
from penstock.workloads.thoughts.tasks import Example, Task, draw_tests
from penstock.workloads.thoughts.validation import Probed, Validation, probe, validate

_SEED = 4_000_000


def check_run(run: Path, *, questions: int, deterministic: bool = False, trust: bool = False) -> Validation:
    """Return the validation of a run's final policy. deterministic: of its likeliest thoughts."""
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
    return judged(probed, task, layout, start, examples)


def start_of(run_dir: Path, section: Thoughts) -> Path:
    """Return the model that a run began with: the one that it made, wherever its folder lies now."""
    own = run_dir / START_MODEL
    return own if own.is_dir() else Path(section.model)


def final_network(run_dir: Path, model: Path) -> Any:
    """Return the network of a run's final policy, which began as a model; raises ValueError."""
    final = read_final(run_dir)
    said = PolicySection.model_validate_json(final.specification.policy_json)
    section = said.model_copy(update={"kwargs": {**said.kwargs, "model": str(model)}})
    specification = final.specification
    policy = build(specification.observation_space, specification.action_space, section, 0)
    load_into(policy, final.blob)
    return policy.network


def judged(
    probed: Probed, task: Task, layout: Layout, model: Path, examples: Sequence[Example]
) -> Validation:
    """Return the validation of measurements, beside those of the model that training began with."""
    start = ThinkingModel(load_transformer(model), layout)
    answered = start.answered(start.questions(examples), None, start.answers(examples))
    return validate(probed, start_losses=-answered.log_prob, most_gain=getattr(task, "most_gain", None))
