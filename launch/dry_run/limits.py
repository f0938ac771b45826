"""The resources of this machine for a run, and the predictions that exceed them."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.dry_run.prediction import Prediction
from launch.inspection.quantities import size
from launch.run.memory import Room, available, device_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Resources that were free before the run started. device: None without a GPU."""

    memory: Room
    disk: Room
    device: Room | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitCheck:
    """The comparison of a prediction with the limits.

    refused: why it is likely not to fit. doubtful: why it may not fit if it takes the upper estimate.
    """

    refused: tuple[str, ...]
    doubtful: tuple[str, ...]


def look(run_dir: Path) -> Limits:
    """Return the current limits, for a run in that folder."""
    place = next(folder for folder in (run_dir, *run_dir.parents) if folder.exists())
    devices = device_memory()
    return Limits(
        memory=available(),
        disk=Room(shutil.disk_usage(place).free, f"free in the file system of {place}"),
        device=None if devices is None else Room(devices[1] - devices[0], "free on the GPUs by nvidia-smi"),
    )


def judge(prediction: Prediction, limits: Limits) -> LimitCheck:
    """Compare each figure with its limit."""
    figures = [
        (
            "memory",
            prediction.memory,
            limits.memory,
            "start fewer actors (--actors) or environments (environment.count), or free memory",
        ),
        (
            "disk",
            prediction.disk_bytes,
            limits.disk,
            "choose another file system with --run-dir, fewer learner.keep_checkpoints, or make room",
        ),
    ]
    if prediction.device_memory is not None and limits.device is not None:
        remedy = (
            "lower algorithm.micro_batch_tokens or environment.count where there are such, or choose "
            "device=cpu"
        )
        figures.append(("GPU memory", prediction.device_memory, limits.device, remedy))
    return LimitCheck(
        refused=_over([(name, needed.likely, room, remedy) for name, needed, room, remedy in figures]),
        doubtful=_over(
            [
                (name, needed.high, room, remedy)
                for name, needed, room, remedy in figures
                if needed.likely <= room.bytes
            ]
        ),
    )


def _over(figures: Sequence[tuple[str, float, Room, str]]) -> tuple[str, ...]:
    return tuple(
        f"{name}: {size(needed)} needed, {size(room.bytes)} there ({room.source}): {remedy}"
        for name, needed, room, remedy in figures
        if needed > room.bytes
    )
