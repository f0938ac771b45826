"""`penstock traces check FILE`."""

import json
import sys
from pathlib import Path
from typing import Any, Final

from penstock.runtime.exit import EXIT_FAILED, EXIT_OK
from workloads.goals.traces.trace_file import Log, action_counts, read_log

_MOST_SHOWN: Final = 50


def main(file: Path, *, as_json: bool) -> int:
    """Print counts and faults of a log; returns 1 where there are faults, or no whole episode."""
    log = read_log(file)
    account = account_of(log)
    sys.stdout.write((json.dumps(account) if as_json else _text(account)) + "\n")
    return EXIT_OK if log.episodes and not log.faults else EXIT_FAILED


def account_of(log: Log) -> dict[str, Any]:
    """Return what a log holds, as JSON values."""
    traces = log.traces
    return {
        "lines": log.lines,
        "episodes": len(log.episodes),
        "episodes_left_out": len(log.broken),
        "decisions": len(traces),
        "independent": log.independent,
        "with_propensity": sum(trace.propensity is not None for trace in traces),
        "success": sum(trace.result.success for trace in traces),
        "numbers": {
            name: [min(trace.observation[name] for trace in traces), max(t.observation[name] for t in traces)]
            for name in log.numbers
        },
        "actions": {
            name: {"done": done, "success": well} for name, (done, well) in action_counts(log).items()
        },
        "faults": [{"line": fault.line, "why": fault.why} for fault in log.faults],
    }


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
    if faults:
        told.append(f"{len(faults)} faults, {account['episodes_left_out']} episodes left out for them:")
    told += [f"  line {fault['line']}: {fault['why']}" for fault in faults[:_MOST_SHOWN]]
    if len(faults) > _MOST_SHOWN:
        told.append(f"  and {len(faults) - _MOST_SHOWN} more; --json lists all")
    return "\n".join(told)
