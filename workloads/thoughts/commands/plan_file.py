"""What a folder of comparisons was made for: OUT/plan.json.

A command that is called again takes what is there as its own. Of another recipe, or measured on other
questions, it would stand in one table with what it cannot be compared with.
"""

import json
from pathlib import Path
from typing import Any, Final

from penstock.config.configuration_error import ConfigurationError

PLAN: Final = "plan.json"


def hold_plan(out: Path, plan: dict[str, Any]) -> None:
    """Write what a folder is for, or raise ConfigurationError where it is for something else.

    plan: JSON values.
    """
    file = out / PLAN
    if file.exists():
        there = json.loads(file.read_text())
        differing = [key for key in sorted({*there, *plan}) if there.get(key) != plan.get(key)]
        if differing:
            raise ConfigurationError(
                f"--out {out}: what is there was made with another {', '.join(differing)} ({file}); name "
                "another folder, or say the same again"
            )
    out.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(plan) + "\n")
