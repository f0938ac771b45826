"""Whether a run can be gone on with under the settings that are asked for, before anything is written.

The learner compares again with the checkpoint that it takes; here a mistake costs nothing.
"""

import json
from pathlib import Path
from typing import Any

from penstock.config.settings import ConfigurationError, Settings
from penstock.learner.progress import check_same, sections


def check_resumable(run_dir: Path, settings: Settings) -> None:
    """Raise ConfigurationError that names what must not change since the newest checkpoint and does.

    A run without a checkpoint that can be read may change anything: the learner begins it anew, or says why
    not.
    """
    begun = _newest_state(run_dir)
    if begun is None:
        return
    name, before = begun.get("run"), begun.get("sections")
    if isinstance(name, str) and settings.run != name:
        raise ConfigurationError(
            f"run={settings.run!r}: {run_dir} holds run {name!r}, whose name stays; leave it out"
        )
    if isinstance(before, dict):
        check_same(settings.run, before, sections(settings))


def _newest_state(run_dir: Path) -> dict[str, Any] | None:
    """Of the newest checkpoint that can be read; ids sort by age, and one half-written begins with a dot."""
    for file in sorted(run_dir.glob("checkpoints/[!.]*/state.json"), reverse=True):
        try:
            state = json.loads(file.read_text())
        except (OSError, ValueError):
            continue
        if isinstance(state, dict):
            return state
    return None
