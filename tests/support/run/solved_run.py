"""A run of CartPole-v1 that has ended, as a folder to copy: solved by version 22, which its registry
holds."""

import json
from pathlib import Path
from typing import Any, Final

from penstock.config.run_folder import CONFIG_FILE
from penstock.config.settings import dump, load

SOLVED_RUN: Final = Path("tests/processes/train/solved_run").absolute()


SECRET = "correct horse"  # noqa: S105 - not one of ours


def make_run(folder: Path, *, rows: int = 3, summary: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True)
    layers = {"run": folder.name, "seed": 4, "environment": {"id": "CartPole-v1"}}
    settings = load([layers, {"security": {"redis_password": SECRET}}])
    (folder / CONFIG_FILE).write_text(dump(settings))
    lines = [
        {
            "time": 1.0,
            "env_steps": 100 * n,
            "updates": n,
            "version": n,
            "training_seconds": 0.5 * n,
            "mean_return": float("nan") if n == 0 else float(n),
            "staleness_p50": 1,
        }
        for n in range(rows)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder
