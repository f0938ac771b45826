"""What `penstock traces check` and `penstock traces evaluate` print."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np

from penstock.config.configuration_error import ConfigurationError
from penstock.config.service_settings import local_settings
from penstock.runtime.exit import EXIT_FAILED, EXIT_OK
from penstock.workloads.goals.off_policy import TooLittle, judge
from penstock.workloads.goals.traces.log_evaluation import (
    Late,
    Question,
    ask,
    ask_recording,
    read_late,
    read_policy,
)
from penstock.workloads.goals.traces.trace_index import Encoding, Log, RewardWeights, TraceIndex, held_log

_MOST_SHOWN: Final = 50
_ESTIMATES: Final = ("ips", "self_normalised", "doubly_robust", "mean_ratio")


def check(file: Path, *, as_json: bool) -> int:
    """Print counts and faults of a log; returns 1 where there are faults, or no whole episode."""
    with TraceIndex.of(file) as index:
        account = _account_of(index)
    sys.stdout.write((json.dumps(account) if as_json else _account_text(account)) + "\n")
    return EXIT_OK if index.episodes and not index.faults else EXIT_FAILED


def _account_of(index: TraceIndex) -> dict[str, Any]:
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
        "faults": [asdict(fault) for fault in index.faults],
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


def _account_text(account: dict[str, Any]) -> str:
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


def evaluate(
    file: Path,
    policies: Sequence[str],
    *,
    discount: float,
    reward: Sequence[str],
    late: str | None,
    late_policy: str,
    deterministic: bool,
    trust: bool,
    as_json: bool,
) -> int:
    """Print the estimates of every policy; returns 1 where the log cannot say one."""
    local = {name: local_settings(Path(name), trust=trust).actor for name in policies}
    if file.is_dir():
        if late or reward:
            raise ConfigurationError(f"{file}: a recording has its rewards; leave --late and --reward out")
        asked = {
            name: ask_recording(file, Path(name), local[name], discount=discount, deterministic=deterministic)
            for name in policies
        }
        return _finish([_judged(name, asked[name], discount) for name in policies], {}, as_json=as_json)
    log, weights = held_log(file), reward_weights(reward)
    found: Late = read_late(late, late_policy) if late else {}
    if late and not found:
        sys.stderr.write(f"--late: there are no late rewards of policy {late_policy!r}\n")
    told = []
    for name in policies:
        policy, encoding = read_policy(
            name, Encoding(log.numbers, log.actions), local[name], deterministic=deterministic
        )
        question = ask(log, encoding, policy, weights=weights, discount=discount, late=found)
        told.append(_judged(name, question, discount))
    return _finish(told, {"logged": _logged(log, weights, found, discount)}, as_json=as_json)


def _finish(told: list[dict[str, Any]], logged: dict[str, Any], *, as_json: bool) -> int:
    if as_json:
        sys.stdout.write(json.dumps({**logged, "policies": told}) + "\n")
    else:
        sys.stdout.write("\n".join(_text(one) for one in told) + "\n")
    return EXIT_OK if all(one["judged"] for one in told) else EXIT_FAILED


def reward_weights(assignments: Sequence[str]) -> RewardWeights:
    """Return the weights of KEY=NUMBER; raises ConfigurationError that names the assignment."""
    given: dict[str, float] = {}
    for one in assignments:
        name, _, text = one.partition("=")
        try:
            given[name] = float(text)
        except ValueError as error:
            raise ConfigurationError(f"--reward {one}: write KEY=NUMBER") from error
    return RewardWeights.of(given)


def _judged(name: str, asked: Question, discount: float) -> dict[str, Any]:
    told: dict[str, Any] = {
        "policy": name,
        "episodes": asked.decisions.episodes,
        "left_out": asked.left_out,
        "late": asked.late,
        "late_unmatched": asked.late_unmatched,
    }
    try:
        found = judge(asked.decisions, discount)
    except TooLittle as error:
        return told | {"judged": False, "why": str(error)}
    return told | {"judged": True, **asdict(found)}


def _logged(log: Log, weights: RewardWeights, late: Late, discount: float) -> dict[str, Any]:
    """Return what was earned: the mean return of all whole episodes, without any estimate."""
    returns = [
        sum(
            discount**trace.step * (weights.reward(trace.result) + late.get((trace.episode, trace.step), 0.0))
            for trace in episode
        )
        for episode in log.episodes
    ]
    return {"episodes": len(returns), "mean_return": float(np.mean(returns))}


def _text(told: dict[str, Any]) -> str:
    used = f"{told['policy']}: {told['episodes']} episodes"
    if told["left_out"]:
        used += f", {told['left_out']} left out for want of a propensity"
    if told["late"] or told["late_unmatched"]:
        used += f", {told['late']} late rewards joined, {told['late_unmatched']} met no decision"
    if not told["judged"]:
        return f"{used}\n  not judged: {told['why']}"
    rows = [
        f"  {name.replace('_', ' '):16} {told[name]['value']:9.4f}   "
        f"[{told[name]['low']:.4f}, {told[name]['high']:.4f}]"
        for name in _ESTIMATES
    ]
    rows.append(f"  effective sample size {told['effective']:.1f}")
    if told["self_normalised"]["low"] == told["self_normalised"]["high"]:
        rows.append(
            f"  all that counts earned the same: a share of up to {3 / told['effective']:.1%} that earns "
            "something else would not show, and the intervals leave it out"
        )
    return "\n".join([used, *rows])
