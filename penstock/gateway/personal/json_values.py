"""Values of runs as JSON has them."""

import math
from typing import Any


def json_values(value: Any) -> Any:
    """Return a value without what JSON lacks: NaN, infinity, letters of file names that are no text.

    Raises RecursionError for one that is nested too deeply.
    """
    if isinstance(value, dict):
        return {json_values(key): json_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_values(item) for item in value]
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    return None if isinstance(value, float) and not math.isfinite(value) else value
