"""Evidence of an update that was not finite: the batch itself, for later examination.

The newest `MOST_KEPT` batches are kept, so that a session which makes updates fail again and again fills no
disk.
"""

import json
from pathlib import Path
from typing import Final

from safetensors.torch import save_file
from torch import Tensor

from penstock.learner.algorithms.algorithm import Update
from penstock.learner.batch import Batch
from penstock.learner.feed.log_batch import LogBatch

MOST_KEPT: Final = 16


def keep_evidence(folder: Path, log_batch: LogBatch, update: Update, count: int) -> str:
    """Write the batch and its origin; returns the path without its endings.

    Args:
        folder: folder to write into.
        log_batch: the batch.
        update: the update that was not finite.
        count: number of updates made, for the name of the file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    base = folder / f"nan-{count:08d}-{log_batch.last}"
    origin = {
        "entries": list(log_batch.trained),
        "updates": list(log_batch.updates),
        "versions": list(log_batch.versions),
        "metrics": update.metrics,
    }
    base.with_suffix(".json").write_text(json.dumps(origin) + "\n")
    if log_batch.batch is not None:
        save_file(_tensors(log_batch.batch), base.with_suffix(".safetensors"))
    _drop_older(folder)
    return str(base)


def _drop_older(folder: Path) -> None:
    """Remove the oldest batches, by the last log entry in their names, beyond `MOST_KEPT`."""
    kept = sorted(folder.glob("nan-*.json"), key=lambda path: int(path.stem.rpartition("-")[2]))
    for path in kept[:-MOST_KEPT]:
        path.with_suffix(".safetensors").unlink(missing_ok=True)
        path.unlink()


def _tensors(batch: Batch) -> dict[str, Tensor]:
    named = {
        name: getattr(batch, name)
        for name in (
            "reward",
            "terminated",
            "truncated",
            "valid",
            "log_prob",
            "final_slot",
            "final_step",
            "update",
        )
    }
    named |= batch.observation | batch.action
    named |= {f"final/{name}": tensor for name, tensor in batch.final_observation.items()}
    return {name: tensor.cpu().contiguous() for name, tensor in named.items()}
