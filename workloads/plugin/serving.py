"""Versions of a run's policy in its folder, and the services that a workload runs beside the core's.

FinalPolicy, read_final   the policy that a run ended with
checkpoint_tensors        part of the newest whole checkpoint of a run
Services                  commands of the processes that a run of the workload has, and where they listen
"""

from pathlib import Path
from typing import Final

from torch import Tensor

from learner.algorithms.shared.stored import under
from learner.checkpoint.store import CheckpointStore
from learner.publish.final_policy import FinalPolicy, read_final
from penstock.config.workload import Services

__all__ = ["FinalPolicy", "Services", "checkpoint_tensors", "read_final"]

_FOLDER: Final = "checkpoints"


def checkpoint_tensors(run_dir: Path, part: str) -> dict[str, Tensor] | None:
    """Return the tensors of one part of a run's newest whole checkpoint, on the CPU, by name in it.

    run_dir: the run's folder. part: the first element of the tensors' paths, such as "critic".
    None: the run has no checkpoint that is whole. Call it when the learner has ended, because the learner
    writes to that folder.
    """
    folder = run_dir / _FOLDER
    if not folder.is_dir():
        return None
    store = CheckpointStore(folder, keep=2)
    newest = store.newest([(name, None) for name in store.ids()])
    return None if newest is None else under(newest.tensors, f"{part}/")
