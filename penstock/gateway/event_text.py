"""How a server-sent event is written."""

import json
from typing import Any, Final

STILL_HERE: Final = ": still here\n\n"
"""A comment: a connection that is gone is noticed by what is sent."""


def event(kind: str, data: Any, number: int | None = None) -> str:
    """Return an event as it is sent.

    data: JSON values. number: its id, which a browser that connects again repeats. Raises ValueError for NaN.
    """
    place = "" if number is None else f"id: {number}\n"
    return f"event: {kind}\n{place}data: {json.dumps(data, allow_nan=False)}\n\n"
