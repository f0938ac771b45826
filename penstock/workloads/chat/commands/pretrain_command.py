"""`penstock chat pretrain`: what the options mean, and what is said at the end."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.config.configuration_error import ConfigurationError
from penstock.runtime.exit import EXIT_OK
from penstock.runtime.lifecycle import Lifecycle
from penstock.runtime.retry import Interrupted


def main(
    lifecycle: Lifecycle,
    files: Sequence[Path],
    out: Path,
    *,
    model: str | None,
    assignments: Sequence[str],
    as_json: bool,
) -> int:
    try:
        from penstock.workloads.language.pretraining.tiny_models import pretrain_base, pretraining_settings
        from penstock.workloads.language.settings import quieten
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"{error.name} is not installed: a chat needs pip install 'penstock-rl[rlhf]'"
        ) from error
    quieten()
    settings = pretraining_settings(assignments)
    try:
        result = pretrain_base(files, out, settings, model=model, stop=lifecycle.draining)
    except Interrupted:
        sys.stderr.write(f"interrupted: nothing was written to {out}; start again\n")
        return EXIT_OK
    sys.stdout.write(json.dumps(result) + "\n" if as_json else "\n".join(_lines(out, result)) + "\n")
    return EXIT_OK


def _lines(out: Path, result: dict[str, Any]) -> list[str]:
    measured = "nothing was held out"
    if result["loss"] is not None:
        measured = (
            f"held out: {result['held_out']}, loss {result['loss_before']:.3g} before, {result['loss']:.3g} "
            f"after, perplexity {result['perplexity']:.3g}"
        )
    return [
        f"{out}: learned from {result['conversations']} conversations",
        measured,
        f"{result['bad']} conversations could not be used",
        *result["bad_shown"],
    ]
