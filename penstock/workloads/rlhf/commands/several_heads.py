"""`penstock rlhf reward train --head …`: what the options mean, and what is said at the end."""

import json
import sys
from collections.abc import Sequence
from typing import Any

from penstock.config.settings import ConfigurationError
from penstock.runtime.exit import EXIT_OK
from penstock.runtime.lifecycle import Lifecycle
from penstock.runtime.retry import Interrupted
from penstock.workloads.rlhf.commands.reward_scoring import needs_rlhf
from penstock.workloads.rlhf.commands.reward_training import Request


def main(
    lifecycle: Lifecycle, request: Request, *, heads: Sequence[str], weights: Sequence[str], as_json: bool
) -> int:
    """Train and print the summary; raises ConfigurationError for what cannot be used."""
    _check_options(request)
    with needs_rlhf():
        from penstock.workloads.language.heads.head import parse_heads, parse_weights
        from penstock.workloads.language.heads.heads_model import HeadsOrder, train_heads
        from penstock.workloads.language.loading import device_of
        from penstock.workloads.language.quiet import quieten
        from penstock.workloads.language.reward.training_section import training_settings
    quieten()
    order = HeadsOrder(
        place=request.feedback,
        heads=parse_heads(heads),
        base=request.model,
        out=request.out,
        settings=training_settings(request.assignments),
        part=request.part,
        weights=parse_weights(weights),
        device=device_of(request.device or "cpu"),
    )
    try:
        results = train_heads(order, lifecycle.draining)
    except Interrupted:
        sys.stderr.write(f"interrupted: nothing was written to {request.out}; start again\n")
        return EXIT_OK
    sys.stdout.write(json.dumps(results) + "\n" if as_json else "\n".join(_lines(request, results)) + "\n")
    return EXIT_OK


def _check_options(request: Request) -> None:
    """Raise ConfigurationError for an option that says something of a model of one head."""
    said = {
        "--scale": request.scale != "none",
        "--key": request.key is not None,
        "--column": bool(request.columns),
        "--reference": request.reference is not None,
        "--resume": request.resume,
    }
    for name, is_said in said.items():
        if is_said:
            raise ConfigurationError(f"{name}: is for a model of one head; leave it out beside --head")


def _lines(request: Request, results: dict[str, Any]) -> list[str]:
    measures = results["measures"]
    pairs = measures["pair_accuracy"]
    return [
        f"{request.out}: best after epoch {results['best_epoch']}",
        f"trained on {results['train']['responses']} responses and {results['train']['pairs']} pairs",
        *(f"{name}: {_measured(one)}" for name, one in measures["heads"].items()),
        f"pairs: {measures['pairs']}" + ("" if pairs is None else f", {pairs:.3g} in the right order"),
        f"{results['bad_rows']} bad rows, {results['other_key']} rows rate something else",
    ]


def _measured(one: dict[str, Any]) -> str:
    numbers = "".join(
        f", {name.replace('_', ' ')} {one[name]:.3g}"
        for name in ("squared_error", "auc", "calibration_error")
        if one[name] is not None
    )
    return f"{one['ratings']} ratings held out{numbers}"
