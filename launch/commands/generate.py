"""`penstock generate RUN`: responses of a run's final language model, without a broker."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from launch.commands.reward_scoring import needs_rlhf
from launch.run.service_settings import local_settings
from learner.publish.final_policy import read_final
from penstock.config.settings import ConfigurationError
from penstock.runtime.exit import EXIT_OK

_WORKLOAD: Final = "rlhf"


def main(
    run: Path,
    prompts: Sequence[str],
    *,
    count: int,
    tokens: int | None,
    seed: int,
    deterministic: bool,
    assignments: tuple[str, ...],
    as_json: bool,
) -> int:
    """Print `count` responses to each prompt; raises ConfigurationError for a folder without such a policy."""
    with needs_rlhf():
        from workloads.rlhf.final_answers import generate
    try:
        final = read_final(run)
    except ValueError as error:
        raise ConfigurationError(f"{run}: {error}") from error
    if final.specification.workload != _WORKLOAD:
        raise ConfigurationError(
            f"{run}: is a run of workload {final.specification.workload!r}, which has no language model; "
            "say `penstock evaluate`"
        )
    answers = generate(
        final.specification,
        final.blob,
        local_settings(run, assignments).actor,
        [prompt for prompt in prompts for _ in range(count)],
        tokens=tokens,
        seed=seed,
        deterministic=deterministic,
    )
    for answer in answers:
        line = json.dumps(asdict(answer)) if as_json else f"{answer.prompt} → {answer.response}"
        sys.stdout.write(f"{line}\n")
    return EXIT_OK
