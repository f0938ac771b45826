"""Runs live, as server-sent events: what has changed since it was sent last, and nothing else.

runs        the list
run         the one that is looked at: progress, activity, end
curve       of it, and of each that it is compared with: {"name", "columns"}
versions    of it
trouble     what cannot be shown now: {"status", "detail"}
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from starlette.concurrency import run_in_threadpool

from penstock.config.configuration_error import ConfigurationError
from penstock.gateway.event_text import STILL_HERE, event
from penstock.gateway.personal.json_values import json_values
from penstock.gateway.personal.shown_runs import Runs, UnknownRun

LOOK_S: Final = 1.0
"""Seconds between two looks."""
QUIET_LOOKS: Final = 15
"""Looks without news after which a sign of life is sent."""


async def live(runs: Runs, chosen: str, compared: Sequence[str], **more: Any) -> AsyncIterator[str]:
    """Yield the events without end.

    chosen: the run that is looked at, "" for none. more: that is told with the list.
    """
    sent = dict[tuple[str, str], str]()
    quiet = 0
    while True:
        fresh = await run_in_threadpool(_looked, runs, chosen, compared, more)
        news = {key: text for key, text in fresh.items() if sent.get(key) != text}
        for gone in sent.keys() - fresh.keys():
            del sent[gone]
        sent |= news
        for text in news.values():
            yield text
        quiet = 0 if news else quiet + 1
        if quiet == QUIET_LOOKS:
            quiet = 0
            yield STILL_HERE
        await asyncio.sleep(LOOK_S)


def _looked(
    runs: Runs, chosen: str, compared: Sequence[str], more: Mapping[str, Any]
) -> dict[tuple[str, str], str]:
    """Return every event as it is now, by kind and run."""
    looks: dict[tuple[str, str], Callable[[], Any]] = {("runs", ""): lambda: {**runs.listed(), **more}}
    if chosen:
        looks["run", chosen] = partial(runs.detail, chosen)
        looks["versions", chosen] = partial(runs.versions, chosen)
        looks |= {("curve", name): partial(_curve, runs, name) for name in (chosen, *compared)}
    return {key: _told(*key, look) for key, look in looks.items()}


def _curve(runs: Runs, name: str) -> Any:
    return {"name": name, "columns": runs.curve(name)}


def _told(kind: str, name: str, look: Callable[[], Any]) -> str:
    """Return what a look finds as an event; what cannot be shown hides nothing else."""
    status = 409
    try:
        return event(kind, json_values(look()))
    except UnknownRun:
        status, detail = 404, f"no run of this name: {name}"
    except RecursionError:
        detail = "a file of this run is nested too deeply to be shown"
    except (OSError, ConfigurationError) as error:
        detail = str(error)
    return event("trouble", json_values({"run": name, "status": status, "detail": detail}))
