"""What a run of thoughts needs before its processes start: RUN/start_model/, the model it begins with.

It is written under another name and then moved: what an interrupted preparation left is made again.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Final

from penstock.config.settings import ConfigurationError, EnvironmentSection, Progress, Settings
from penstock.workloads.language.guard import read_guard_files
from penstock.workloads.language.loading import quieten, whole_folder
from penstock.workloads.thoughts.environment import (
    longest_legal_thought,
    longest_row,
    task_of,
    thoughts_section,
)

START_MODEL: Final = "start_model"
CARD: Final = "warm_start.json"
_GUARD_FILES: Final = ("guard_rules", "guard_classifier")


def prepare(settings: Settings, run_dir: Path, progress: Progress) -> Settings:
    """Return the settings with the model named that was made; raises ConfigurationError, Interrupted."""
    quieten()
    from penstock.workloads.thoughts.model import mixing_width  # noqa: PLC0415 - loads torch

    section = thoughts_section(settings.environment)
    if settings.learner.device == "cuda":
        raise ConfigurationError("learner.device='cuda': thoughts are learned on the CPU; say cpu")
    check_lengths(settings)
    mixing_width(settings.policy)
    # A server needs them; that they cannot be used is said before anything is made.
    read_guard_files(section.guard_rules, section.guard_classifier)
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
        # A server has another working folder.
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
    from penstock.workloads.language.tokenizer import load_tokenizer  # noqa: PLC0415 - loads torch

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
    import torch  # noqa: PLC0415 - as what follows

    from penstock.workloads.thoughts.start.warm_start import (  # noqa: PLC0415 - load torch
        build_transformer,
        save_transformer,
        warm_start,
    )

    if folder.is_dir():
        return folder.absolute()
    section = thoughts_section(environment)
    task, layout = task_of(environment)
    # More threads than cores that are free wait for each other at every small product.
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
    """Raise ConfigurationError where rows or groups do not fit, or no thought could be learned from."""
    section, count = thoughts_section(settings.environment), settings.environment.count
    if count % section.group:
        raise ConfigurationError(
            f"environment.kwargs.group={section.group}: environment.count={count} is no multiple of it"
        )
    baseline = getattr(settings.algorithm, "baseline", "none")
    if section.group == 1 and baseline in ("group", "both"):
        raise ConfigurationError(
            f"environment.kwargs.group=1: a thought that is alone on its question equals the mean of "
            f"algorithm.baseline={baseline!r}, and nothing is learned; give 2 or more, or another baseline"
        )
    if section.group == count and getattr(settings.algorithm, "reward_from", "own") == "another":
        raise ConfigurationError(
            f"environment.count={count}: a fragment has a single question, and "
            "algorithm.reward_from='another' gives each thought the reward of another; give twice "
            f"environment.kwargs.group={section.group} or more"
        )
    steps = longest_legal_thought(settings.environment)
    if section.thought_tokens < steps:
        raise ConfigurationError(
            f"environment.kwargs.thought_tokens={section.thought_tokens}: a legal thought of "
            f"environment.kwargs.task={section.task!r} has up to {steps} steps; give as many, and one "
            "for the mark that ends it"
        )
    needed = longest_row(settings.environment) - 1
    if settings.actor.unroll_length < needed:
        raise ConfigurationError(
            f"actor.unroll_length={settings.actor.unroll_length}: a question of "
            f"environment.kwargs.task={section.task!r} with a thought and its answer needs {needed}"
        )
