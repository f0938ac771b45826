"""Lines of a `metrics.jsonl`, read as they are: a crash may have torn one, or somebody written others."""

import json
import math
from typing import Any, Final

COUNTS: Final = ("env_steps", "updates", "version")
_MOST: Final = 2**63
"""No count is larger; an integer of JSON may be, and be no float."""


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The figures of a line, numbers or None by name; None for a line that no learner has written whole."""
    if not (line.startswith(b"{") and line.endswith(b"}")):
        return None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not all(map(_is_figure, row.values())):
        return None
    return row if all(math.isfinite(row.get(name) or 0) for name in COUNTS) else None


def _is_figure(value: object) -> bool:
    if isinstance(value, int):
        return abs(value) <= _MOST
    return value is None or isinstance(value, float)
