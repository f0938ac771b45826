"""What lies in the folder of a round: made by one step, read by the next, and gone when the round is over.

believed.jsonl       ratings that count
prompts.jsonl        what people had said before the answers that they rated, and the run's own prompts
judge/               the reward model
begin.safetensors    the weights of the version that answers, which the training begins with
round.toml, run/     the training; the weights of its versions stay, which servers read there
steps.log, lock      what the steps printed, and the lock that they hold
"""

import json
import shutil
from pathlib import Path
from typing import Any, Final

from penstock.workloads.chat.loop.step_process import LOCK, LOG, StepFailed

BELIEVED: Final = "believed.jsonl"
PROMPTS: Final = "prompts.jsonl"
JUDGE: Final = "judge"
CARD: Final = "heads.json"
BEGIN: Final = "begin.safetensors"
RECIPE: Final = "round.toml"
RUN: Final = "run"
_SUMMARY: Final = "summary.json"
KNOWN: Final = {"thumb": "thumbs", "relevance": "stars", "helpfulness": "stars", "safety": "stars"}
"""What the page asks for, and its scale."""
_LASTS: Final = frozenset({RUN, LOCK, LOG})
_LASTS_OF_RUN: Final = frozenset({"policies", "config.toml", "seal", _SUMMARY, "logs"})


def rated_heads(believed: Path) -> list[str]:
    """Return NAME=SCALE for what was rated, of what the page asks for; raises StepFailed without any."""
    with believed.open() as file:
        keys = {json.loads(line)["key"] for line in file}
    found = [f"{name}={scale}" for name, scale in KNOWN.items() if name in keys]
    if not found:
        known = ", ".join(KNOWN)
        raise StepFailed(f"no rating is of {known}: say what people rate with --head NAME=SCALE")
    return found


def told_apart(card: Path) -> tuple[float | None, float | None]:
    """Return the thumb's area under the curve on what was held out, and the number that judges the model.

    That is the same, or the share of pairs in the right order where no thumb was held out; None: nothing was.
    """
    measures: dict[str, Any] = json.loads(card.read_bytes())["trained"]["measures"]
    thumb: float | None = measures["heads"].get("thumb", {}).get("auc")
    return thumb, measures["pair_accuracy"] if thumb is None else thumb


def facts_of(card: Path) -> dict[str, Any]:
    """Return the weights of a reward model, and its measures on what was held out: no text of anybody."""
    found = json.loads(card.read_bytes())
    return {"weights": found["weights"], "measures": found["trained"]["measures"]}


def is_done(run: Path) -> bool:
    """Return whether a training has ended by itself, as its folder says."""
    summary = _summary(run)
    return bool(summary) and not summary["interrupted"] and "failure" not in summary


def name_of(run: Path) -> str:
    """Return the name of a training that has ended, under which its versions are registered."""
    return str(_summary(run)["run"])


def has_checkpoint(run: Path) -> bool:
    """Return whether there is something of a training to go on with."""
    return any((run / "checkpoints").glob("[!.]*/state.json"))


def forget_texts(folder: Path) -> None:
    """Remove what people wrote from a round's folder, and what only a training needs; raises OSError."""
    for path in folder.glob("*"):
        if path.name not in _LASTS:
            _remove(path)
    for path in (folder / RUN).glob("*"):
        if path.name not in _LASTS_OF_RUN:
            _remove(path)


def _summary(run: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((run / _SUMMARY).read_bytes()))
    except (FileNotFoundError, ValueError):
        return {}


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
