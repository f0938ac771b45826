"""`penstock traces check FILE`."""

import json
import sys
from pathlib import Path
from typing import Any, Final

from penstock.runtime.exit import EXIT_FAILED, EXIT_OK
from penstock.workloads.goals.traces.trace_index import TraceIndex

_MOST_SHOWN: Final = 50


def main(file: Path, *, as_json: bool) -> int:
    """Print counts and faults of a log; returns 1 where there are faults, or no whole episode."""
    with TraceIndex.of(file) as index:
        account = account_of(index)
    sys.stdout.write((json.dumps(account) if as_json else _text(account)) + "\n")
    return EXIT_OK if index.episodes and not index.faults else EXIT_FAILED


def account_of(index: TraceIndex) -> dict[str, Any]:
    return {
        "lines": index.lines,
        "episodes": index.episodes,
        "episodes_left_out": len(index.broken),
        "decisions": index.decisions,
        "independent": index.independent,
        "with_propensity": index.with_propensity,
        "success": index.well.total(),
        "numbers": _ranges(index),
        "actions": {name: {"done": index.done[name], "success": index.well[name]} for name in index.actions},
        "faults": [{"line": fault.line, "why": fault.why} for fault in index.faults],
    }


def _ranges(index: TraceIndex) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for trace in index.traces():
        for name, value in trace.observation.items():
            known = found.setdefault(name, [value, value])
            if value < known[0]:
                known[0] = value
            elif value > known[1]:
                known[1] = value
    return dict(sorted(found.items()))


def _text(account: dict[str, Any]) -> str:
    shape = "independent decisions" if account["independent"] else "episodes of several decisions"
    first = (
        f"{account['lines']} lines, {account['episodes']} whole episodes, {account['decisions']} decisions "
        f"({shape}), {account['success']} with success, {account['with_propensity']} with propensity"
    )
    told = [first, *(f"  {name}: {low:g} to {high:g}" for name, (low, high) in account["numbers"].items())]
    told += [
        f"  {name}: done {one['done']} times, {one['success']} with success"
        for name, one in account["actions"].items()
    ]
    faults = account["faults"]
    if not account["lines"]:
        told.append("the file is empty: a log has a line for each decision")
    if faults:
        told.append(f"{len(faults)} faults, {account['episodes_left_out']} episodes left out for them:")
    told += [f"  line {fault['line']}: {fault['why']}" for fault in faults[:_MOST_SHOWN]]
    if len(faults) > _MOST_SHOWN:
        told.append(f"  and {len(faults) - _MOST_SHOWN} more; --json lists all")
    return "\n".join(told)
