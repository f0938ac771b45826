"""`penstock traces import FILE --out DIR`: a log as a recording, for `penstock train --from`."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import tomli_w
import torch

from penstock.config.configuration_error import ConfigurationError
from penstock.config.service_settings import over_defaults
from penstock.config.workload import find
from penstock.runtime.exit import EXIT_OK
from penstock.workloads.goals.commands.trace_evaluation import reward_weights
from penstock.workloads.goals.traces.answers import Encoding
from penstock.workloads.goals.traces.trace_index import MOST_HELD, TraceIndex, write_sample
from penstock.workloads.goals.traces.trace_line import RewardWeights
from penstock.workloads.goals.traces.trace_recording import record_log
from penstock.workloads.plugin.learning import make_step_model
from penstock.workloads.plugin.recordings import RecordingWriter, single_rank

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
    encoding = Encoding(index.numbers, index.actions)
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
        "fragments": _record(index, encoding, weights, layer, out),
        "faults": len(index.faults),
        "propensities": _LOGGED if index.with_propensity == index.decisions else "estimated",
        "measured_by": measured,
    }
    (out / _RUN_FILE).write_text(
        f"# From {index.episodes} episodes, measured by {measured}; "
        f"propensities: {account['propensities']}.\n" + tomli_w.dumps(layer)
    )
    if index.independent and account["propensities"] == _LOGGED:
        (out / _WEIGHTED_FILE).write_text(
            f"# Learns without the recording, from {measured} episodes: what is logged counts by its "
            "propensity.\n" + tomli_w.dumps(by_propensity(layer))
        )
    return account


def _record(
    index: TraceIndex, encoding: Encoding, weights: RewardWeights, layer: dict[str, Any], out: Path
) -> int:
    settings = over_defaults([layer, {"run": "traces"}])
    specification = make_step_model(settings, find("goals"), single_rank(), torch.device("cpu")).specification
    writer = RecordingWriter.begin(out, specification, "policy", settings.learner.record_max_bytes)
    try:
        return record_log(index, encoding, weights, specification, writer)
    finally:
        writer.close()


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
    """Return the settings of a run that learns from single decisions, each by its propensity: PPO."""
    environment = layer["environment"]
    kwargs = {**environment["kwargs"], "mode": "matched"}
    return {**layer, "environment": {**environment, "kwargs": kwargs}, "algorithm": {"name": "ppo"}}
