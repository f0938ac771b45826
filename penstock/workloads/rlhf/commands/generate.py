"""`penstock rlhf generate RUN`: responses of a run's final language model, without a broker."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer

from penstock.config.configuration_error import ConfigurationError
from penstock.runtime.exit import EXIT_OK
from penstock.runtime.foreground import AsJson, Assignments, Trust
from penstock.workloads.rlhf.commands.reward_commands import needs_rlhf

_WORKLOAD: Final = "rlhf"


def generate(
    run: Annotated[Path, typer.Argument(help="Folder of a run of language models that has ended.")],
    prompt: Annotated[
        list[str], typer.Option("--prompt", metavar="TEXT", help="What to answer; may be repeated.")
    ],
    count: Annotated[int, typer.Option(min=1, help="Responses to each prompt.")] = 1,
    tokens: Annotated[int | None, typer.Option(min=1, help="At most; default: as in training.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the draws.")] = 0,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="The most likely tokens; default: drawn as in training.")
    ] = False,
    assignments: Assignments = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> int:
    """Have the final language model of a run answer."""
    from penstock.config.service_settings import local_settings

    with needs_rlhf():
        from penstock.workloads.plugin.serving import read_final
        from penstock.workloads.rlhf.artefacts import generate as answers_of
    try:
        final = read_final(run)
    except ValueError as error:
        raise ConfigurationError(f"{run}: {error}") from error
    if final.specification.workload != _WORKLOAD:
        raise ConfigurationError(
            f"{run}: is a run of workload {final.specification.workload!r}, which has no language model; "
            "say `penstock evaluate`"
        )
    answers = answers_of(
        final.specification,
        final.blob,
        local_settings(run, tuple(assignments or ()), trust=trust).actor,
        [one for one in prompt for _ in range(count)],
        tokens=tokens,
        seed=seed,
        deterministic=deterministic,
    )
    for answer in answers:
        line = json.dumps(asdict(answer)) if as_json else f"{answer.prompt} → {answer.response}"
        sys.stdout.write(f"{line}\n")
    return EXIT_OK
