"""`penstock traces check` and `evaluate`: the return that a policy would have earned in a log.

A policy is `uniform`, `always:NAME`, or the folder of a run; a Q-network acts ε-greedily. Rewards may arrive
after their decision.
"""

import json
import re
import sys
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from penstock.config.configuration_error import ConfigurationError
from penstock.config.service_settings import local_settings
from penstock.protocol.spaces import Box, Discrete
from penstock.registry.records import RegistryError
from penstock.registry.registry import Registry
from penstock.registry.row_file import RowFile
from penstock.runtime.exit import EXIT_FAILED, EXIT_OK
from penstock.workloads.goals.commands import EvaluateOptions
from penstock.workloads.goals.off_policy import (
    Decisions,
    TooLittle,
    cross_fitted,
    imitated,
    judge,
    returns_from,
)
from penstock.workloads.goals.trace_index import (
    Brought,
    Encoding,
    Log,
    RewardWeights,
    TraceIndex,
    explained,
    held_log,
)

# ---- Policies, as the probabilities of their actions.

_ALWAYS: Final = "always:"

Chances = Callable[[NDArray[np.float32]], NDArray[np.float64]]
"""(observations, float32 [n, width]) → probability of every action, float64 [n, actions]."""


def fixed(of_actions: NDArray[np.float64]) -> Chances:
    """Return a policy with the same probabilities for every observation."""
    return lambda seen: np.tile(of_actions, (len(seen), 1))


def learned(policy: Any, *, deterministic: bool) -> Chances:
    """Return the probabilities of a run's policy. deterministic: 1 for its most likely action."""

    def chances(seen: NDArray[np.float32]) -> NDArray[np.float64]:
        step = policy.step({"observation": seen})
        found: NDArray[np.float64] = policy.distribution(step.parameters)["action/probability"].astype(float)
        if deterministic:
            found = np.eye(found.shape[1])[found.argmax(1)]
        found /= found.sum(1, keepdims=True)
        return found

    return chances


def read_policy(
    named: str, encoding: Encoding, local: Any, *, deterministic: bool
) -> tuple[Chances, Encoding]:
    """Return the policy of a name, and the encoding of its observations. local: this process's `actor`."""
    if named == "uniform":
        count = len(encoding.actions)
        return fixed(np.full(count, 1 / count)), encoding
    if named.startswith(_ALWAYS):
        try:
            chosen = encoding.action(named.removeprefix(_ALWAYS))
        except ValueError as error:
            raise ConfigurationError(f"--policy {named}: {error}") from error
        return fixed(np.eye(len(encoding.actions))[chosen]), encoding
    run, log = Path(named), encoding
    specification, policy = learned_policy(run, local)
    kwargs = json.loads(specification.environment_json).get("kwargs", {})
    encoding = Encoding(tuple(kwargs.get("numbers", log.numbers)), tuple(kwargs.get("actions", log.actions)))
    _check_spaces(run, specification, encoding, log)
    return learned(policy, deterministic=deterministic), encoding


def learned_policy(run: Path, local: Any) -> tuple[Any, Any]:
    """Return specification and final policy of a run that has ended. local: this process's `actor`."""
    # These load torch, which the other policies do not need.
    from penstock.policy.weights import load_into  # noqa: PLC0415
    from penstock.workloads.plugin.acting import policy_maker  # noqa: PLC0415
    from penstock.workloads.plugin.serving import read_final  # noqa: PLC0415

    try:
        final = read_final(run)
    except ValueError as error:
        raise ConfigurationError(
            f"--policy {run}: {error}; name `uniform`, `always:NAME` or the folder of a run that has ended"
        ) from error
    policy = policy_maker(final.specification, local)()
    load_into(policy, final.blob)
    return final.specification, policy


def _check_spaces(run: Path, specification: Any, encoding: Encoding, log: Encoding) -> None:
    seen, done = specification.observation_space, specification.action_space
    fits = (
        isinstance(seen, Box)
        and seen.shape == (encoding.width,)
        and isinstance(done, Discrete)
        and done.n == len(encoding.actions)
    )
    lacks = sorted(set(encoding.numbers) - set(log.numbers)) + sorted(
        set(log.actions) - set(encoding.actions)
    )
    if not fits or lacks:
        raise ConfigurationError(
            f"--policy {run}: was trained on observations {seen} and actions {done}; the log has numbers "
            f"{', '.join(log.numbers)} and actions {', '.join(log.actions)}"
            + (f"; they differ in {', '.join(lacks)}" if lacks else "")
        )


# ---- The decisions of a log, for one policy.

Late = Mapping[tuple[str, int], float]
"""Sum of the late rewards, by episode and step."""

Evidence = tuple[Decisions, dict[str, int]]
"""Decisions by which a policy is evaluated, and counts of the rest.

left_out: whole episodes without the propensity of some decision. late: decisions of the log with a late
reward; late_unmatched: late rewards of other decisions.
"""


def evidence_of_log(
    log: Log, policy: str, local: Any, weights: RewardWeights, late: Late, options: EvaluateOptions
) -> Evidence:
    """Return the decisions of episodes whose propensities are all known: others would be weighted wrongly."""
    chances, encoding = read_policy(policy, log.encoding, local, deterministic=options.deterministic)
    used = [episode for episode in log.episodes if all(one.propensity is not None for one in episode)]
    traces = [trace for episode in used for trace in episode]
    seen = encoding.episodes(used)
    action = np.array([encoding.action(trace.action) for trace in traces], np.int64)
    episode = np.repeat(np.arange(len(used)), [len(one) for one in used]).astype(np.int64)
    reward = np.array(
        [weights.reward(one.result) + late.get((one.episode, one.step), 0.0) for one in traces], np.float64
    )
    logged = np.log([one.propensity or 1.0 for one in traces])
    decisions = _decisions(episode, seen, action, chances(seen), reward, logged, options.discount)
    decisions = replace(decisions, imitated=imitated(seen, action, episode, len(encoding.actions)))
    met = sum((trace.episode, trace.step) in late for trace in log.traces)
    left_out = len(log.episodes) - len(used)
    return decisions, {"left_out": left_out, "late": met, "late_unmatched": len(late) - met}


def _decisions(
    episode: NDArray[np.int64],
    seen: NDArray[np.float32],
    action: NDArray[np.int64],
    chosen: NDArray[np.float64],
    reward: NDArray[np.float64],
    log_logged: NDArray[np.float64],
    discount: float,
) -> Decisions:
    """Return decisions for a policy with probabilities `chosen`, float64 [n decisions, actions]."""
    model = cross_fitted(seen, action, returns_from(episode, reward, discount), episode, chosen.shape[1])
    rows = np.arange(len(action))
    with np.errstate(divide="ignore"):
        log_target = np.log(chosen[rows, action])
    return Decisions(
        episode=episode,
        reward=reward,
        log_target=log_target,
        log_logged=log_logged,
        predicted=model[rows, action],
        expected=(chosen * model).sum(1),
        action=action,
    )


# ---- Rewards that came after their decision: {"episode": "monday", "step": 3, "amount": 0.5}

_PAGE: Final = 1000


class _LateReward(Brought):
    episode: Annotated[str, Field(min_length=1, max_length=128)]
    step: Annotated[int, Field(ge=0, strict=True)]
    amount: Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False, strict=True)]
    number: int | None = None
    createdAt: str | None = None  # noqa: N815 - as a gateway exports it
    request: str | None = None

    @property
    def keys(self) -> list[tuple[str, Any]]:
        """Return what it is known by if it comes twice."""
        return [(name, value) for name in ("number", "request") if (value := getattr(self, name)) is not None]


def read_late(place: str, policy: str) -> Late:
    """Return the late rewards in a file of JSON lines, or of a policy in the registry at a URL."""
    is_registry = place.startswith(("sqlite:", "postgresql:"))
    total: defaultdict[tuple[str, int], float] = defaultdict(float)
    for episode, step, amount in _of_registry(place, policy) if is_registry else _of_file(Path(place)):
        total[episode, step] += amount
    return dict(total)


def _of_file(path: Path) -> Iterator[tuple[str, int, float]]:
    """Yield the rewards of a file, one that it holds twice, by number or request, once.

    Raises ConfigurationError that lists the bad rows: without them every estimate would be wrong.
    """
    known: dict[tuple[str, Any], _LateReward] = {}
    bad: list[str] = []
    with RowFile.of(path, f"--late {path}") as file:
        for number, row in file.rows():
            try:
                one = _late_reward(row)
                before = _before(one, known)
            except ValueError as error:
                bad.append(f"{path}: {file.unit} {number}: {error}")
                continue
            known.update(dict.fromkeys(one.keys, one))
            if before is None:
                yield _said(one)
    if bad:
        rest = [f"and {len(bad) - _MOST_SHOWN} more"] if len(bad) > _MOST_SHOWN else []
        raise ConfigurationError("\n".join([*bad[:_MOST_SHOWN], *rest]))


def _late_reward(row: dict[str, Any] | ValueError) -> _LateReward:
    if isinstance(row, ValueError):
        raise row
    try:
        return _LateReward.model_validate(row)
    except ValidationError as error:
        raise ValueError(explained(error)) from error


def _before(one: _LateReward, known: Mapping[tuple[str, Any], _LateReward]) -> _LateReward | None:
    """Return the reward where it came already; raises ValueError where its key is that of another one."""
    for key in one.keys:
        if key in known:
            if _said(known[key]) != _said(one):
                raise ValueError(f"{key[0]}={key[1]!r}: is that of another reward before it")
            return known[key]
    return None


def _said(one: _LateReward) -> tuple[str, int, float]:
    return one.episode, one.step, one.amount


def _of_registry(url: str, policy: str) -> Iterator[tuple[str, int, float]]:
    try:
        with Registry.read(url) as registry:
            after = 0
            while page := registry.feedback(policy, after, _PAGE):
                yield from ((one.episode, one.step, one.amount) for one in page)
                after = page[-1].number
    except (RegistryError, ValueError) as error:
        raise ConfigurationError(f"--late: {error}") from error


# ---- The decisions of a recording, from actors or from clients of a policy server.

_Key = tuple[int, int, int]
"""Session, slot and number of an episode."""
_Arrays = Mapping[str, NDArray[Any]]
_STEP_TENSORS: Final = ("observation", "action", "mask", "reward", "log_prob")


@dataclass(slots=True)
class _Episode:
    """steps: its rows by step. length: of the whole episode; 0 while its end is not found."""

    steps: dict[int, int] = field(default_factory=dict)
    length: int = 0
    known: bool = True

    @property
    def is_whole(self) -> bool:
        return self.known and 0 < self.length == len(self.steps)


def evidence_of_recording(folder: Path, run: Path, local: Any, options: EvaluateOptions) -> Evidence:
    """Return the decisions of a recording's whole episodes, for the final policy of a run."""
    from penstock.workloads.plugin.recordings import Recording  # noqa: PLC0415 - loads torch

    recording = Recording(folder)
    specification, policy = learned_policy(run, local)
    recording.check_schema(specification.schema.schema_id)
    if policy.memory.is_recurrent or policy.memory.frames.depth > 1:
        raise ConfigurationError(
            f"--policy {run}: has a memory, so its actions depend on more than a single step"
        )
    rows, episodes = collected(recording.load(recording.fragments))
    whole = [episode for episode in episodes.values() if episode.is_whole]
    order = np.array([episode.steps[step] for episode in whole for step in range(episode.length)], np.int64)
    episode = np.repeat(np.arange(len(whole)), [one.length for one in whole]).astype(np.int64)
    rows = {name: array[order] for name, array in rows.items()}
    reward, logged = rows["reward"].astype(np.float64), np.minimum(rows["log_prob"].astype(np.float64), 0.0)
    if isinstance(specification.observation_space, Box) and isinstance(specification.action_space, Discrete):
        chances = learned(policy, deterministic=options.deterministic)(rows["observation"])
        flat = rows["observation"].reshape(len(reward), -1).astype(np.float32)
        action = rows["action"].astype(np.int64)
        decisions = _decisions(episode, flat, action, chances, reward, logged, options.discount)
    elif options.deterministic:
        raise ConfigurationError("--deterministic: only for actions that are one of n")
    else:
        nothing = np.zeros(len(reward))
        seen, taken = (
            {name: array for name, array in rows.items() if name.partition("/")[0] in heads}
            for heads in (("observation", "mask"), ("action",))
        )
        log_target = np.minimum(policy.log_prob(seen, taken).astype(np.float64), 0.0)
        decisions = Decisions(
            episode=episode, reward=reward, log_target=log_target, log_logged=logged, predicted=nothing,
            expected=nothing,
        )  # fmt: skip
    return decisions, {"left_out": len(episodes) - len(whole), "late": 0, "late_unmatched": 0}


def collected(loaded: Iterable[tuple[Any, _Arrays]]) -> tuple[dict[str, NDArray[Any]], dict[_Key, _Episode]]:
    """Return all steps by tensor name, [n, …], and the episodes with the numbers of their steps."""
    parts: defaultdict[str, list[NDArray[Any]]] = defaultdict(list)
    episodes: defaultdict[_Key, _Episode] = defaultdict(_Episode)
    count = 0
    for header, arrays in loaded:
        steps = header.steps
        for column, slot in enumerate(header.slots):
            for name, array in arrays.items():
                if name.partition("/")[0] in _STEP_TENSORS:
                    parts[name].append(array[:steps, column])
            number, index = slot.episode_id, slot.first_step
            for row in range(steps):
                episode = episodes[header.session, slot.slot_id, number]
                episode.steps[index] = count + row
                episode.known &= bool(arrays["valid"][row, column])
                index += 1
                if arrays["terminated"][row, column] or arrays["truncated"][row, column]:
                    episode.length, number, index = index, number + 1, 0
            count += steps
    return {name: np.concatenate(part) for name, part in parts.items()}, dict(episodes)


# ---- The output of the commands.

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
        "look_alikes": look_alikes(index.done),
        "faults": [asdict(fault) for fault in index.faults],
    }


_RARE: Final = 0.05
"""Most uses of a misspelt action, as a share of those of the right one."""


def look_alikes(done: Mapping[str, int]) -> dict[str, str]:
    """Return actions that may be misspelt, each with the one that it looks like; done: uses by name.

    They differ in case, marks or the form of letters alone, or in a few letters, and are rare.
    """
    found: dict[str, str] = {}
    shapes: dict[str, str] = {}
    for name, count in sorted(done.items(), key=lambda one: -one[1]):
        shape = "".join(filter(str.isalnum, unicodedata.normalize("NFKD", name).casefold()))
        words = re.sub(r"\d+", "", shape)
        usual = {each: other for each, other in shapes.items() if count <= _RARE * done[other]}
        near = get_close_matches(shape, usual, n=1, cutoff=0.8)
        if shape in shapes:
            found[name] = shapes[shape]
        elif near and re.sub(r"\d+", "", near[0]) != words:
            found[name] = usual[near[0]]
        else:
            shapes[shape] = name
    return found


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
    lines = [first, *(f"  {name}: {low:g} to {high:g}" for name, (low, high) in account["numbers"].items())]
    lines += [
        f"  {name}: done {one['done']} times, {one['success']} with success"
        for name, one in account["actions"].items()
    ]
    lines += [
        f"  {name!r} looks like {other!r}: is it misspelt?" for name, other in account["look_alikes"].items()
    ]
    faults = account["faults"]
    if not account["lines"]:
        lines.append("the file is empty: a log has a line for each decision")
    if faults:
        lines.append(f"{len(faults)} faults, {account['episodes_left_out']} episodes left out for them:")
    lines += [f"  line {fault['line']}: {fault['why']}" for fault in faults[:_MOST_SHOWN]]
    if len(faults) > _MOST_SHOWN:
        lines.append(f"  and {len(faults) - _MOST_SHOWN} more; --json lists all")
    return "\n".join(lines)


def evaluate(file: Path, options: EvaluateOptions, *, as_json: bool) -> int:
    """Print the estimates of every policy; returns 1 where the log does not suffice for one."""
    local = {name: local_settings(Path(name), trust=options.trust).actor for name in options.policy}
    logged: dict[str, Any] = {}
    if file.is_dir():
        if options.late or options.reward:
            raise ConfigurationError(f"{file}: a recording has its rewards; leave --late and --reward out")
        evidence = [evidence_of_recording(file, Path(name), local[name], options) for name in options.policy]
    else:
        log, weights = held_log(file), reward_weights(options.reward or ())
        late: Late = read_late(options.late, options.late_policy) if options.late else {}
        if options.late and not late:
            sys.stderr.write(f"--late: there are no late rewards of policy {options.late_policy!r}\n")
        evidence = [
            evidence_of_log(log, name, local[name], weights, late, options) for name in options.policy
        ]
        logged = {"logged": _logged(log, weights, late, options.discount)}
    rows = [
        {"policy": name, "episodes": decisions.episodes, **counts, **_estimates(decisions, options.discount)}
        for name, (decisions, counts) in zip(options.policy, evidence, strict=True)
    ]
    text = json.dumps({**logged, "policies": rows}) if as_json else "\n".join(map(_text, rows))
    sys.stdout.write(f"{text}\n")
    return EXIT_OK if all(one["judged"] for one in rows) else EXIT_FAILED


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


def _estimates(decisions: Decisions, discount: float) -> dict[str, Any]:
    try:
        return {"judged": True, **asdict(judge(decisions, discount))}
    except TooLittle as error:
        return {"judged": False, "why": str(error)}


def _logged(log: Log, weights: RewardWeights, late: Late, discount: float) -> dict[str, Any]:
    """Return the mean return of all whole episodes, which was earned in fact."""
    returns = [
        sum(
            discount**trace.step * (weights.reward(trace.result) + late.get((trace.episode, trace.step), 0.0))
            for trace in episode
        )
        for episode in log.episodes
    ]
    return {"episodes": len(returns), "mean_return": float(np.mean(returns))}


def _text(row: dict[str, Any]) -> str:
    used = f"{row['policy']}: {row['episodes']} episodes"
    if row["left_out"]:
        used += f", {row['left_out']} left out for want of a propensity"
    if row["late"] or row["late_unmatched"]:
        used += f", {row['late']} late rewards joined, {row['late_unmatched']} met no decision"
    if not row["judged"]:
        return f"{used}\n  not judged: {row['why']}"
    rows = [
        f"  {name.replace('_', ' '):16} {row[name]['value']:9.4f}   "
        f"[{row[name]['low']:.4f}, {row[name]['high']:.4f}]"
        for name in _ESTIMATES
    ]
    rows.append(f"  effective sample size {row['effective']:.1f}")
    if row["self_normalised"]["low"] == row["self_normalised"]["high"]:
        rows.append(
            f"  all that counts earned the same: a share of up to {3 / row['effective']:.1%} that earns "
            "something else would not show, and the intervals leave it out"
        )
    return "\n".join([used, *rows])
