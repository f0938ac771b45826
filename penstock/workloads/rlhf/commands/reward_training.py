"""`penstock rlhf reward train`: what the options mean, and what is said at the end."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config.settings import ConfigurationError
from penstock.runtime.exit import EXIT_OK
from penstock.runtime.lifecycle import Lifecycle
from penstock.workloads.rlhf.commands.reward_scoring import needs_rlhf, parse_columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the user asked for."""

    feedback: str
    model: str
    out: Path
    scale: str
    key: str | None
    part: str | None
    columns: tuple[str, ...]
    reference: str | None
    resume: bool
    device: str | None
    assignments: tuple[str, ...]


def main(lifecycle: Lifecycle, request: Request, *, as_json: bool) -> int:
    """Train and print the summary; raises ConfigurationError for what cannot be used."""
    with needs_rlhf():
        from penstock.workloads.language.feedback.examples import parse_scale
        from penstock.workloads.language.feedback.feedback_places import Source
        from penstock.workloads.language.quiet import quieten
        from penstock.workloads.language.reward.training import Order, train
        from penstock.workloads.language.reward.training_section import training_settings
    quieten()
    try:
        scale = parse_scale(request.scale)
    except ValueError as error:
        raise ConfigurationError(f"--{error}") from error
    columns = parse_columns(request.columns)
    source = Source(place=request.feedback, scale=scale, part=request.part, key=request.key, columns=columns)
    order = Order(
        source=source,
        base=request.model,
        out=request.out,
        settings=training_settings(request.assignments),
        reference=None
        if request.reference is None
        else Source(place=request.reference, scale=scale, columns=columns),
        resume=request.resume,
        device=request.device,
    )
    results = train(order, lifecycle.draining)
    if results is not None:
        sys.stdout.write(
            json.dumps(results) + "\n" if as_json else "\n".join(_lines(request.out, results)) + "\n"
        )
    return EXIT_OK


def _lines(out: Path, results: dict[str, Any]) -> Sequence[str]:
    from penstock.workloads.language.reward.reward_model import doubt

    feedback = results["feedback"]
    found = results["validation"] or {}
    measured = "  ".join(f"{name} {value:.4g}" for name, value in found.items() if value is not None)
    trained, validated = (_count(feedback[side]) for side in ("train", "validation"))
    return [
        f"{out}: {results['steps']} steps in {results['seconds']:g} s, best at step {results['best_step']}",
        f"trained on {trained}, validated on {validated}",
        f"{feedback['bad_rows']} bad rows, {feedback['prompts_cut']} prompts cut",
        f"validation: {measured or 'none'}",
        *([doubted] if (doubted := doubt(results["validation"])) else []),
        f"scores: mean {results['reward_mean']:.4g}, std {results['reward_std']:.4g}",
        f"sha256 {results['sha256']}",
    ]


def _count(side: dict[str, int]) -> str:
    return f"{side['scored']} scores and {side['pairs']} pairs"
