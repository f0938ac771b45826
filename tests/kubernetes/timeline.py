"""What a broker tells of a run, every second, and the picture of it.

python -m tests.kubernetes.timeline SAMPLES.json PICTURE.png
"""

import json
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from matplotlib.figure import Figure

from tests.kubernetes.bare_pod import BarePod
from tests.kubernetes.installation import Installation

_PROGRAM: Final = """
import json, time
from pathlib import Path
from penstock.launch.inspection.flow import ask
from penstock import Credentials
from penstock.runtime.lifecycle import Fatal

files = {"certificate": "own.pem", "key": "own.key", "authority": "authority.pem"}
files = {name: Path("/certificates") / file for name, file in files.items()}
credentials = Credentials.from_files(insecure=False, **files)
while True:
    row = {"time_s": time.time()}
    try:
        reply = ask("broker:50051", credentials, timeout_s=2.0)
    except Fatal:
        pass
    else:
        learner = json.loads(reply.learner_json or "{}")
        row |= {"acked": reply.acked, "version": reply.latest.version, "env_steps": learner.get("env_steps")}
    print(json.dumps(row), flush=True)
    time.sleep(1.0)
"""
_LEAP: Final = 1_000_000
"""Versions: so many are not published between two looks."""
_WINDOW_S: Final = 5.0
"""Over which steps per second are taken."""


def watcher(installation: Installation) -> BarePod:
    return BarePod(
        installation=installation,
        name="watcher",
        program=_PROGRAM,
        words=(),
        image="penstock-broker",
        labels={"app.kubernetes.io/component": "operator"},
        certificate="operator",
    )


def draw(rows: Sequence[Mapping[str, Any]], marks: Mapping[str, float], picture: Path) -> None:
    """Steps per second, acknowledged fragments and published versions over time.

    rows: as the pod prints them. marks: by what happened, the time at which it did, as the rows have it.
    """
    begun = rows[0]["time_s"]
    told = [row for row in rows if row.get("env_steps") is not None]
    seconds = [row["time_s"] - begun for row in told]
    figure = Figure(figsize=(8.0, 6.0), layout="constrained")
    axes = figure.subplots(3, 1, sharex=True)
    axes[0].plot(*_rates(told, begun))
    axes[1].plot(seconds, [row["acked"] for row in told])
    axes[2].plot(seconds, _published(told))
    silent = [row["time_s"] - begun for row in rows if row.get("env_steps") is None]
    for axis, title in zip(
        axes, ("environment steps per second", "fragments acknowledged", "versions published"), strict=True
    ):
        axis.set_title(title, loc="left", fontsize="medium")
        for moment in marks.values():
            axis.axvline(moment - begun, color="grey", linewidth=0.8, linestyle=":")
        if silent:
            axis.plot(silent, [axis.get_ylim()[0]] * len(silent), "|", color="tab:red")
    for name, moment in marks.items():
        at = (moment - begun, axes[0].get_ylim()[1])
        axes[0].annotate(name, at, rotation=90, va="top", ha="right", fontsize="x-small")
    axes[-1].set_xlabel("seconds (red: no broker answered within 2 s)")
    figure.savefig(picture, dpi=110)


def _published(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """How many versions came since the first row; a leap of the numbers, where Redis is back, counts once."""
    counts = [0]
    for before, row in pairwise(rows):
        more = row["version"] - before["version"]
        counts.append(counts[-1] + (more if more < _LEAP else 1))
    return counts


def _rates(rows: Sequence[Mapping[str, Any]], begun: float) -> tuple[list[float], list[float]]:
    """Times, and steps per second of the window that ends there."""
    times, rates, first = [], [], 0
    for row in rows:
        while rows[first]["time_s"] < row["time_s"] - _WINDOW_S:
            first += 1
        seconds = row["time_s"] - rows[first]["time_s"]
        if seconds > 0.0:
            times.append(row["time_s"] - begun)
            # A learner that goes on from its checkpoint counts from there.
            rates.append(max(0.0, (row["env_steps"] - rows[first]["env_steps"]) / seconds))
    return times, rates


def main(samples: Path, picture: Path) -> None:
    told = json.loads(samples.read_text())
    draw(told["rows"], told["marks"], picture)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
