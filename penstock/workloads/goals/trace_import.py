"""`penstock traces import FILE --out DIR`: a log as a recording, for `penstock train --from`.

The log is read and written decision by decision, and never held in memory.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import tomli_w
import torch
from numpy.typing import NDArray

from penstock.config.configuration_error import ConfigurationError
from penstock.config.service_settings import over_defaults
from penstock.config.workload import find
from penstock.protocol.messages import Publication
from penstock.runtime.exit import EXIT_OK
from penstock.workloads.goals.log_evaluation import reward_weights
from penstock.workloads.goals.off_policy import Imitation, imitate
from penstock.workloads.goals.trace_index import (
    MOST_HELD,
    Encoding,
    RewardWeights,
    Trace,
    TraceIndex,
    write_sample,
)
from penstock.workloads.plugin.learning import make_step_model
from penstock.workloads.plugin.recordings import (
    Ended,
    FragmentBuilder,
    HeaderFields,
    RecordingWriter,
    Stepped,
    single_rank,
)

_RUN_FILE: Final = "run.toml"
_WEIGHTED_FILE: Final = "by_propensity.toml"
_LOGGED: Final = "logged"
_SAMPLE_FILE: Final = "measured.jsonl"


def main(file: Path, out: Path, *, reward: Sequence[str], as_json: bool) -> int:
    """Write the recording with the settings of a run that learns from it; print what was written."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigurationError(f"--out {out}: holds something already; name a new folder")
    weights = reward_weights(reward)
    with TraceIndex.of(file) as index:
        index.check_episodes()
        account = _write(index, weights, out)
    sys.stdout.write((json.dumps(account) if as_json else _text(account, out)) + "\n")
    return EXIT_OK


def _write(index: TraceIndex, weights: RewardWeights, out: Path) -> dict[str, Any]:
    encoding = index.encoding
    out.mkdir(parents=True, exist_ok=True)
    held, measured = index.path, index.episodes
    if index.decisions > MOST_HELD:
        held = out / _SAMPLE_FILE
        measured = write_sample(index, held)
    layer = run_layer(held, encoding, weights)
    account = {
        "folder": str(out),
        "episodes": index.episodes,
        "decisions": index.decisions,
        "fragments": record_log(index, encoding, weights, layer, out),
        "faults": len(index.faults),
        "propensities": _propensities(index),
        "measured_by": measured,
    }
    (out / _RUN_FILE).write_text(
        f"# From {index.episodes} episodes, measured by {measured}; "
        f"propensities: {account['propensities']}.\n" + tomli_w.dumps(layer)
    )
    if index.independent and index.with_propensity:
        (out / _WEIGHTED_FILE).write_text(
            f"# Learns without the recording, from {measured} episodes, each decision weighted by its "
            "propensity.\n" + tomli_w.dumps(by_propensity(layer))
        )
    return account


def _propensities(index: TraceIndex) -> str:
    if index.with_propensity in (0, index.decisions):
        return _LOGGED if index.with_propensity else "estimated"
    return f"{_LOGGED} of {index.with_propensity} decisions, estimated of the others"


def _text(account: dict[str, Any], out: Path) -> str:
    text = (
        f"{out}: {account['episodes']} episodes, {account['decisions']} decisions, {account['faults']} "
        f"faults left out; propensities {account['propensities']}\n"
        f"learn from it: penstock train {out / _RUN_FILE} --from {out}"
    )
    if (out / _WEIGHTED_FILE).exists():
        text += f"\nor by its propensities: penstock train {out / _WEIGHTED_FILE}"
    if account["measured_by"] < account["episodes"]:
        text += f"\nmeasured by {account['measured_by']} of the episodes, which {out / _SAMPLE_FILE} holds"
    return text


def run_layer(file: Path, encoding: Encoding, weights: RewardWeights) -> dict[str, Any]:
    """Return the settings of a run that learns from the log: DQN, which needs no propensities."""
    kwargs = {
        "trace_file": str(file.absolute()),
        "mode": "model",
        "numbers": list(encoding.numbers),
        "actions": list(encoding.actions),
        "reward": asdict(weights),
    }
    return {
        "workload": "goals",
        "environment": {"id": "Traces-v0", "kwargs": kwargs},
        "algorithm": {"name": "dqn"},
    }


def by_propensity(layer: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a run that learns from single decisions, weighted by propensity: PPO."""
    environment = layer["environment"]
    kwargs = {**environment["kwargs"], "mode": "matched"}
    return {**layer, "environment": {**environment, "kwargs": kwargs}, "algorithm": {"name": "ppo"}}


# ---- The decisions of a log as a recording; propensities that are absent are estimated.

_ALONE: Final = np.zeros(1, np.intp)
_CHUNK: Final = 4096
_MOST_IMITATED: Final = 4_000_000
"""Most numbers in the observations from which propensities are estimated."""


@dataclass(frozen=True, slots=True)
class _Decision:
    """A trace as arrays of a recording. seen: float32 [1, width]. log_prob: float32 [1]."""

    trace: Trace
    action: int
    seen: NDArray[np.float32]
    log_prob: NDArray[np.float32]


def record_log(
    index: TraceIndex, encoding: Encoding, weights: RewardWeights, layer: dict[str, Any], out: Path
) -> int:
    """Write the decisions of all whole episodes, and return how many fragments they are."""
    settings = over_defaults([layer, {"run": "traces"}])
    specification = make_step_model(settings, find("goals"), single_rank(), torch.device("cpu")).specification
    builder = FragmentBuilder(specification.schema, specification.unroll_length, 1)
    fragments = 0
    most_bytes = settings.learner.record_max_bytes
    with closing(RecordingWriter.begin(out, specification, "policy", most_bytes)) as writer:
        for one, after in pairwise(chain(_decisions(index, encoding), (None,))):
            assert one is not None, "the last is never the first of two"
            if not fragments and not builder.length:
                builder.start({"observation": one.seen})
            step = _stepped(one, after, weights.reward(one.trace.result))
            builder.record({"action": np.array([one.action])}, one.log_prob, step)
            if not builder.is_full and after is not None:
                continue
            fragments += 1
            fields = HeaderFields(
                run=specification.run, session=1, sequence=fragments, weights=Publication(version=1), round=0
            )
            if not writer.fragment(builder.cut(fields)[0]):
                raise ConfigurationError(
                    f"{index.path}: is larger than a recording may be (learner.record_max_bytes); split it "
                    "between two episodes"
                )
    return fragments


def _stepped(one: _Decision, after: _Decision | None, reward: float) -> Stepped:
    ends = after is None or after.trace.step == 0
    return Stepped(
        observation={"observation": one.seen if after is None else after.seen},
        reward=np.array([reward]),
        terminated=np.array([ends]),
        truncated=np.zeros(1, np.bool_),
        valid=None,
        ended=Ended(_ALONE, {"observation": one.seen}) if ends else None,
    )


def _decisions(index: TraceIndex, encoding: Encoding) -> Iterator[_Decision]:
    estimate = None if index.with_propensity == index.decisions else _imitated(index, encoding)
    encoded = _encoded(index.traces(), encoding)
    while chunk := list(islice(encoded, _CHUNK)):
        seen = np.stack([seen for _, seen in chunk])
        action = np.array([encoding.action(trace.action) for trace, _ in chunk], np.int64)
        known = [trace.propensity for trace, _ in chunk]
        if estimate is not None:
            guessed = estimate(seen, action)
            known = [one or guess for one, guess in zip(known, guessed, strict=True)]
        log_prob = np.log(np.array(known, np.float64)).astype(np.float32)
        for row, (trace, _) in enumerate(chunk):
            yield _Decision(trace, int(action[row]), seen[row : row + 1], log_prob[row : row + 1])


def _encoded(traces: Iterable[Trace], encoding: Encoding) -> Iterator[tuple[Trace, NDArray[np.float32]]]:
    before = None
    for trace in traces:
        yield trace, encoding.observation(trace, before if trace.step else None)
        before = trace.result


def _imitated(index: TraceIndex, encoding: Encoding) -> Imitation:
    """Return the estimate from every n-th decision; n is 1 unless the log is large."""
    every = -(-index.decisions * encoding.width // _MOST_IMITATED)
    every_nth = islice(_encoded(index.traces(), encoding), 0, None, every)
    shown = [(seen, encoding.action(trace.action)) for trace, seen in every_nth]
    seen, action = np.stack([seen for seen, _ in shown]), np.array([one for _, one in shown], np.int64)
    return imitate(seen, action, len(encoding.actions))
