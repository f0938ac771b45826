"""`penstock traces evaluate FILE --policy RUN`."""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.config.configuration_error import ConfigurationError
from penstock.config.service_settings import local_settings
from penstock.runtime.exit import EXIT_FAILED, EXIT_OK
from penstock.workloads.goals.off_policy import TooLittle, judge
from penstock.workloads.goals.traces.answers import Encoding
from penstock.workloads.goals.traces.judged_policy import read_policy
from penstock.workloads.goals.traces.late_rewards import Late, read_late
from penstock.workloads.goals.traces.log_evaluation import Question, ask
from penstock.workloads.goals.traces.trace_file import Log, need_episodes
from penstock.workloads.goals.traces.trace_line import RewardWeights

_ESTIMATES = ("ips", "self_normalised", "doubly_robust", "mean_ratio")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to judge; fields as the options of the command."""

    file: Path
    policies: tuple[str, ...]
    discount: float
    reward: tuple[str, ...]
    late: str | None
    late_policy: str
    deterministic: bool
    trust: bool


def main(request: Request, *, as_json: bool) -> int:
    """Print the estimates of every policy; returns 1 where the log cannot say one."""
    if request.file.is_dir():
        return _finish([_of_recording(request, name) for name in request.policies], {}, as_json=as_json)
    log = need_episodes(request.file)
    weights = reward_weights(request.reward)
    late: Late = read_late(request.late, request.late_policy) if request.late else {}
    if request.late and not late:
        sys.stderr.write(f"--late: there are no late rewards of policy {request.late_policy!r}\n")
    told = [_judged(request, log, name, weights, late) for name in request.policies]
    logged = {"logged": _logged(log, weights, late, request.discount)}
    return _finish(told, logged, as_json=as_json)


def _finish(told: list[dict[str, Any]], logged: dict[str, Any], *, as_json: bool) -> int:
    if as_json:
        sys.stdout.write(json.dumps({**logged, "policies": told}) + "\n")
    else:
        sys.stdout.write("\n".join(_text(one) for one in told) + "\n")
    return EXIT_OK if all(one["judged"] for one in told) else EXIT_FAILED


def reward_weights(assignments: tuple[str, ...]) -> RewardWeights:
    """Return the weights of KEY=NUMBER; raises ConfigurationError that names the assignment."""
    given: dict[str, float] = {}
    for one in assignments:
        name, _, text = one.partition("=")
        try:
            given[name] = float(text)
        except ValueError as error:
            raise ConfigurationError(f"--reward {one}: write KEY=NUMBER") from error
    return RewardWeights.of(given)


def _judged(request: Request, log: Log, name: str, weights: RewardWeights, late: Late) -> dict[str, Any]:
    local = local_settings(Path(name), trust=request.trust).actor
    policy, encoding = read_policy(
        name, Encoding(log.numbers, log.actions), local, deterministic=request.deterministic
    )
    asked = ask(log, encoding, policy, weights=weights, discount=request.discount, late=late)
    return _account(name, asked, request.discount)


def _of_recording(request: Request, name: str) -> dict[str, Any]:
    if request.late or request.reward:
        raise ConfigurationError(
            f"{request.file}: a recording has its rewards; leave --late and --reward out"
        )
    from penstock.workloads.goals.traces.trace_recording import ask_recording

    local = local_settings(Path(name), trust=request.trust).actor
    asked = ask_recording(
        request.file, Path(name), local, discount=request.discount, deterministic=request.deterministic
    )
    return _account(name, asked, request.discount)


def _account(name: str, asked: Question, discount: float) -> dict[str, Any]:
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
