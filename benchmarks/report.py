"""Write `docs/algorithms.md` from the records of `benchmarks/results/`."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import proof_pictures, staleness, staleness_report, synchronous
from benchmarks.proof_records import Record
from benchmarks.proofs import SOURCES, Proof

Records = Mapping[tuple[str, str, str, int], Record]

HEAD = """# Algorithms

This page says which algorithms exist, which tasks each of them has been seen to solve, and how asynchrony
affects learning. `make learn` generates it from [`proofs.jsonl`](../benchmarks/results/proofs.jsonl), which
holds command, commit, result and curve of every run; do not edit it by hand. A
[tutorial](tutorials/add-an-algorithm.md) adds an algorithm of your own.

| algorithm | what it is |
|---|---|
| `ppo` | PPO with a decoupled objective (Hilton, Cobbe and Schulman 2021): clipped around the policy at the start of the batch, weighted by its ratio to the behaviour policy. GAE or V-trace once per batch with the current critic. `algorithm.objective=coupled` gives the original form. |
| `impala` | V-trace actor-critic (Espeholt et al. 2018): targets and policy gradient corrected for the policy that acted, by truncated ratios; one gradient step on each batch, nothing clipped. On policy the advantage of V-trace is GAE's at `gae_lambda=1` only: below, it is δ + (A − δ)/λ, which weighs later steps more by 1/λ. |
| `reinforce` | The policy gradient with a learned baseline (Williams 1992): Monte-Carlo returns or GAE, one gradient step on each batch, nothing corrected or clipped. |
| `dqn` | Deep Q-network (Mnih et al. 2015), double (van Hasselt et al. 2016), from [replay](replay.md); n-step, dueling and prioritised on request. |
| `sac` | Soft actor-critic (Haarnoja et al. 2018b) from [replay](replay.md), with a temperature that tunes itself. |
| `token_ppo` | PPO of [language models](rlhf.md), token by token, held near the model that it began with. |

`algorithm.name` chooses one; `penstock train TASK --set algorithm.name=impala --print-config` shows its
settings, and `penstock/config/sections/algorithms.py` says what each means. These values change during a run,
and `metrics.jsonl` and Prometheus report each of them:

- the learning rate: `learning_rate_schedule` constant, linear or cosine, each with `warmup_updates`; with PPO
  also `adaptive_kl`, which steers it by the divergence of each update;
- the entropy bonus: `entropy_coefficient` · `entropy_decay`ⁿ after n updates, never below `entropy_floor`;
- PPO's clip: `clip_range` with `clip_schedule`, `dual_clip` (Ye et al. 2020), `value_clip`;
- PPO on experience that lags: whole fragments beyond `stale_after` are dropped and booked; steps beyond
  `mask_after` stay out of the losses; a step is used `epochs` times at most, and `lagging_epochs` times once it
  is more than `staleness` behind.

Losses and gradients are compared with independent implementations on the same tensors: PPO with
Stable-Baselines3 (`tests/learning/test_against_stable_baselines.py`), GAE, V-trace, IMPALA and REINFORCE with
TorchRL (`tests/learning/test_against_torchrl.py`), DQN and SAC with Stable-Baselines3
(`tests/learning/test_replay_against_stable_baselines.py`), twenty updates of PPO with a plain one
(`tests/learning/test_oracle.py`).

## Learning proofs

An entry passes when the evaluation (100 deterministic episodes with fixed seeds on separate environments)
reaches the threshold within the steps. An entry marked ≤ shows what cannot be learned; it passes when the
evaluation after all steps stays below. Steps are those until the run ended; seconds are those of training
until the version that solved the task was made (`solved_at` of the summary), else until the end.

A run is evaluated whenever the mean of its last 20 training episodes reaches the target, always on the same
100 seeds, and it ends at the first evaluation that reaches the threshold. The table shows that version's own
mean. Since these seeds chose the version, the mean lies somewhat above what fresh seeds would give, most of
all where an entry only just passes.

The settings of each task were tuned beforehand on seeds that overlap those of the proofs. Where some seeds
failed, settings were changed and every seed was run again: MountainCar twice, the constant of batch
normalisation once. The newest record of a seed counts; the older ones remain in `proofs.jsonl`.

| task | algorithm | threshold | passed | evaluation (median) | steps (median) | training seconds (median) | published |
|---|---|---|---|---|---|---|---|
"""


def write(proofs: Sequence[Proof], records: Records, *, results: Path, docs: Path) -> None:
    """Write `algorithms.md` and its picture of curves into the folder `docs`.

    results: folder of `synchronous.jsonl` and `staleness.jsonl`, whose sections follow; absent files add
    none.
    """
    groups = _groups(proofs)
    panels = [(group[0], [records[p.key] for p in group if p.key in records]) for group in groups]
    proof_pictures.curves(panels, docs / "images" / "proofs.png")
    (docs / "algorithms.md").write_text(page(proofs, records, results=results))


def page(proofs: Sequence[Proof], records: Records, *, results: Path) -> str:
    """Return the text of `algorithms.md`; arguments as for `write`."""
    groups = _groups(proofs)
    text = HEAD + "".join(_row(group, records) for group in groups) + _missing(proofs, records)
    text += _commands(groups)
    text += synchronous.section(results / "synchronous.jsonl")
    return text + staleness_report.section(list(staleness.read(results / "staleness.jsonl").values()))


def _groups(proofs: Sequence[Proof]) -> list[list[Proof]]:
    """Return the proofs grouped by all but their seed."""
    groups: dict[tuple[str, str, str], list[Proof]] = {}
    for proof in proofs:
        groups.setdefault((proof.task, proof.algorithm, proof.variant), []).append(proof)
    return list(groups.values())


def _row(group: list[Proof], records: Records) -> str:
    first, found = group[0], [records[proof.key] for proof in group if proof.key in records]
    passed = sum(record.passed for record in found)
    ended = [record for record in found if "error" not in record.result and record.result["evaluation"]]
    cells = [
        first.title,
        f"`{first.algorithm}`",
        f"{first.wanted} within {first.total_steps:,}",
        f"{passed} of {len(group)}",
        _median([record.result["evaluation"]["mean"] for record in ended], "{:,.1f}"),
        _median([record.result["env_steps"] for record in ended], "{:,.0f}"),
        _median([_seconds(record.result) for record in ended], "{:,.1f}"),
        SOURCES.get(first.task, "–"),
    ]
    return f"| {' | '.join(cells)} |\n"


def _seconds(result: Mapping[str, Any]) -> float | None:
    """Of training until the version that solved the task was made; where none did, until the end.

    Records from before `solved_at` have that under `training_seconds`.
    """
    solved = result.get("solved_at")
    seconds: float | None = solved["seconds"] if solved else result["training_seconds"]
    return seconds


def _median(values: list[float | None], form: str) -> str:
    numbers = [value for value in values if value is not None]
    return form.format(statistics.median(numbers)) if numbers else "–"


def _missing(proofs: Sequence[Proof], records: Records) -> str:
    lines = []
    for group in _groups(proofs):
        absent = [str(p.seed) for p in group if p.key not in records]
        failed = [str(p.seed) for p in group if p.key in records and not records[p.key].passed]
        parts = [f"not run: seed {', '.join(absent)}"] if absent else []
        parts += [f"not passed: seed {', '.join(failed)}"] if failed else []
        if parts:
            lines.append(f"- {group[0].title}, `{group[0].algorithm}`: {'; '.join(parts)}\n")
    return "\n## Missing\n\n" + ("".join(lines) or "Nothing.\n")


def _commands(groups: Sequence[list[Proof]]) -> str:
    head = """
## Curves and commands

A line is a seed: the mean return of its last 100 training episodes, which explore; the dashed line is the
threshold of the evaluation, which does not. A run ends as soon as it passes, so a curve may end below.

![Learning curves of every entry](images/proofs.png)

`make learn` runs what is missing; each line here runs one seed of an entry.

```sh
"""
    lines = [f"# seeds {', '.join(str(p.seed) for p in group)}\n{group[0].command}\n" for group in groups]
    return head + "".join(lines) + "```\n"
