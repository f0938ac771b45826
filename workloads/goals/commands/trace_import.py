"""`penstock traces import FILE --out DIR`: a log as a recording, for `penstock train --from`."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np
import tomli_w
import torch
from numpy.typing import NDArray

from penstock.config.configuration_error import ConfigurationError
from penstock.config.service_settings import over_defaults
from penstock.config.workload import find
from penstock.runtime.exit import EXIT_OK
from penstock.wire.messages import Publication
from workloads.goals.commands.trace_evaluation import reward_weights
from workloads.goals.traces.encoding import Encoding
from workloads.goals.traces.propensity_model import estimated_propensities
from workloads.goals.traces.trace_file import Log, need_episodes
from workloads.goals.traces.trace_reward import RewardWeights
from workloads.plugin.learning import make_step_model
from workloads.plugin.recordings import (
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
_ALONE: Final = np.zeros(1, np.intp)


def main(file: Path, out: Path, *, reward: tuple[str, ...], as_json: bool) -> int:
    """Write the recording and, beside it, the settings of a run that learns from it; print what was written.

    Raises ConfigurationError for a log without a whole episode and a folder that is taken.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigurationError(f"--out {out}: holds something already; name a new folder")
    log, weights = need_episodes(file), reward_weights(reward)
    encoding = Encoding(log.numbers, log.actions)
    layer = run_layer(file, encoding, weights)
    account = _write(log, encoding, weights, layer, out)
    (out / _RUN_FILE).write_text(
        f"# From {account['episodes']} episodes; propensities: {account['propensities']}.\n"
        + tomli_w.dumps(layer)
    )
    if log.independent and account["propensities"] == _LOGGED:
        (out / _WEIGHTED_FILE).write_text(
            "# Learns without the recording: what is logged counts by its propensity.\n"
            + tomli_w.dumps(by_propensity(layer))
        )
    text = (
        f"{out}: {account['episodes']} episodes, {account['decisions']} decisions, {len(log.faults)} faults "
        f"left out; propensities {account['propensities']}\n"
        f"learn from it: penstock train {out / _RUN_FILE} --from {out}"
    )
    if (out / _WEIGHTED_FILE).exists():
        text += f"\nor by its propensities: penstock train {out / _WEIGHTED_FILE}"
    sys.stdout.write((json.dumps(account) if as_json else text) + "\n")
    return EXIT_OK


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
        "environment": {"id": "workloads.goals.tasks:Traces-v0", "kwargs": kwargs},
        "algorithm": {"name": "dqn"},
    }


def by_propensity(layer: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a run that learns from single decisions, each by its propensity: PPO."""
    environment = layer["environment"]
    kwargs = {**environment["kwargs"], "mode": "matched"}
    return {**layer, "environment": {**environment, "kwargs": kwargs}, "algorithm": {"name": "ppo"}}


def _write(
    log: Log, encoding: Encoding, weights: RewardWeights, layer: dict[str, Any], out: Path
) -> dict[str, Any]:
    settings = over_defaults([layer, {"run": "traces"}])
    model = make_step_model(settings, find("goals"), single_rank(), torch.device("cpu"))
    specification = model.specification
    log_prob, known = _log_probs(log, encoding)
    builder = FragmentBuilder(specification.schema, specification.unroll_length, 1)
    writer = RecordingWriter.begin(out, specification, "policy", settings.learner.record_max_bytes)
    seen = encoding.episodes(log.episodes)
    ends = np.cumsum([len(episode) for episode in log.episodes]) - 1
    is_end = np.isin(np.arange(len(seen)), ends)
    fragments = 0
    try:
        builder.start({"observation": seen[:1]})
        for index, trace in enumerate(log.traces):
            action = np.array([encoding.action(trace.action)])
            step = _stepped(seen, index, weights.reward(trace.result), ends=bool(is_end[index]))
            builder.record({"action": action}, log_prob[index : index + 1], step)
            if builder.is_full or index + 1 == len(seen):
                fragments += 1
                fields = HeaderFields(
                    run=specification.run,
                    session=1,
                    sequence=fragments,
                    weights=Publication(version=1),
                    round=0,
                )
                if not writer.fragment(builder.cut(fields)[0]):
                    raise ConfigurationError(
                        f"{out}: the log is larger than learner.record_max_bytes; split it"
                    )
    finally:
        writer.close()
    return {
        "folder": str(out),
        "episodes": len(log.episodes),
        "decisions": len(seen),
        "fragments": fragments,
        "faults": len(log.faults),
        "propensities": _LOGGED if known else "estimated",
    }


def _stepped(seen: NDArray[np.float32], index: int, reward: float, *, ends: bool) -> Stepped:
    after = seen[index + 1 : index + 2] if index + 1 < len(seen) else seen[index : index + 1]
    last = Ended(_ALONE, {"observation": seen[index : index + 1]}) if ends else None
    return Stepped(
        observation={"observation": after},
        reward=np.array([reward]),
        terminated=np.array([ends]),
        truncated=np.zeros(1, np.bool_),
        valid=None,
        ended=last,
    )


def _log_probs(log: Log, encoding: Encoding) -> tuple[NDArray[np.float32], bool]:
    """Return log μ of every decision, float32 [n], and whether the log knows all of them."""
    told = [trace.propensity for trace in log.traces]
    if all(one is not None for one in told):
        return np.log(np.array(told, np.float64)).astype(np.float32), True
    action = np.array([encoding.action(trace.action) for trace in log.traces], np.int64)
    guessed = estimated_propensities(encoding.episodes(log.episodes), action, len(encoding.actions))
    logged = np.array([one or guess for one, guess in zip(told, guessed, strict=True)])
    return np.log(logged).astype(np.float32), False
