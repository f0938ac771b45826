"""`penstock rlhf reward train`: what the options mean, and what is said at the end."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.config.settings import ConfigurationError
from penstock.runtime.exit import EXIT_OK
from penstock.runtime.lifecycle import Lifecycle
from penstock.runtime.retry import Interrupted
from penstock.workloads.rlhf.commands.reward_scoring import needs_rlhf, parse_columns


def main(
    lifecycle: Lifecycle,
    *,
    feedback: str,
    model: str,
    out: Path,
    scale: str,
    key: str | None,
    part: str | None,
    columns: Sequence[str],
    heads: Sequence[str],
    weights: Sequence[str],
    reference: str | None,
    resume: bool,
    device: str | None,
    assignments: Sequence[str],
    as_json: bool,
) -> int:
    """Train and print the summary; raises ConfigurationError for what cannot be used."""
    of_heads = bool(heads or weights)
    if of_heads:
        _check_options(
            {
                "--scale": scale != "none",
                "--key": key is not None,
                "--column": bool(columns),
                "--reference": reference is not None,
                "--resume": resume,
            }
        )
    with needs_rlhf():
        from penstock.workloads.language.feedback.examples import parse_scale
        from penstock.workloads.language.feedback.feedback_places import Source
        from penstock.workloads.language.loading import device_of
        from penstock.workloads.language.quiet import quieten
        from penstock.workloads.language.reward.heads import parse_heads, parse_weights
        from penstock.workloads.language.reward.training import Order, train
        from penstock.workloads.language.settings import training_settings
    quieten()
    try:
        measured = parse_scale(scale)
    except ValueError as error:
        raise ConfigurationError(f"--{error}") from error
    named = parse_columns(columns)
    order = Order(
        source=Source(place=feedback, scale=measured, part=part, key=key, columns=named),
        base=model,
        out=out,
        settings=training_settings(tuple(assignments)),
        reference=None if reference is None else Source(place=reference, scale=measured, columns=named),
        resume=resume,
        device=device_of(device or "cpu") if of_heads else device,
        heads=parse_heads(heads) if of_heads else (),
        weights=parse_weights(weights),
    )
    try:
        results = train(order, lifecycle.draining)
    except Interrupted:
        if of_heads:
            sys.stderr.write(f"interrupted: nothing was written to {out}; start again\n")
        return EXIT_OK
    lines = (_heads_lines if of_heads else _lines)(out, results)
    sys.stdout.write(json.dumps(results) + "\n" if as_json else "\n".join(lines) + "\n")
    return EXIT_OK


def _check_options(said: dict[str, bool]) -> None:
    """Raise ConfigurationError for an option that says something of a model of one head."""
    for name, is_said in said.items():
        if is_said:
            raise ConfigurationError(f"{name}: is for a model of one head; leave it out beside --head")


def _lines(out: Path, results: dict[str, Any]) -> Sequence[str]:
    from penstock.workloads.language.reward.measures import doubt

    feedback = results["feedback"]
    found = results["validation"] or {}
    measured = "  ".join(f"{name} {value:.4g}" for name, value in found.items() if value is not None)
    trained, validated = (
        f"{feedback[side]['scored']} scores and {feedback[side]['pairs']} pairs"
        for side in ("train", "validation")
    )
    return [
        f"{out}: {results['steps']} steps in {results['seconds']:g} s, best at step {results['best_step']}",
        f"trained on {trained}, validated on {validated}",
        f"{feedback['bad_rows']} bad rows, {feedback['prompts_cut']} prompts cut",
        f"validation: {measured or 'none'}",
        *([doubted] if (doubted := doubt(results["validation"])) else []),
        f"scores: mean {results['reward_mean']:.4g}, std {results['reward_std']:.4g}",
        f"sha256 {results['sha256']}",
    ]


def _heads_lines(out: Path, results: dict[str, Any]) -> Sequence[str]:
    measures = results["measures"]
    pairs = measures["pair_accuracy"]
    return [
        f"{out}: best after epoch {results['best_epoch']}",
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
