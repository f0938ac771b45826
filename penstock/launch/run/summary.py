"""The summary of a run: `summary.json` and what is printed at the end.

Results of learning come from the learner's `learner.json` (its final account, after the last commit);
processes, Redis and wall time from the launcher.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from penstock.launch.inspection.curve import shown, size
from penstock.launch.run.memory import together
from penstock.launch.run.plan import Plan, replace_text
from penstock.launch.run.supervisor import Account

SUMMARY_FILE: Final = "summary.json"
_LEARNT: Final = (
    "ending",
    "restored_from",
    "mean_return",
    "training_episodes",
    "evaluation",
    "env_steps",
    "updates",
    "policy_version",
    "training_seconds",
    "solved_at",
    "env_steps_per_second",
    "staleness",
    "ledger",
    "recording",
)


_ENDINGS: Final = {
    "target": "the target was reached",
    "steps": "all steps are done",
    "updates": "all updates are done",
    "rejected": "the algorithm's own validation rejected what was learned",
    "no_improvement": "evaluations brought no improvement any more (evaluation.patience)",
    "stopped": "an operator stopped it",
    "recording": "the recording is at its end",
    "drained": "it was asked to end",
    "stalled": "no update was made any more",
    "episodes": "the training episodes that learner.total_episodes asks for have ended",
    "seconds": "its time is over",
}
"""Values of `ending` in the learner's account, in words."""
_BASE_VERDICTS: Final = {
    "better": "better than the base",
    "worse": "worse than the base",
    "chance": "cannot be told from chance",
}
"""Values of `verdict` in a comparison with the policy before training, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisFacts:
    """Version and durability of the run's Redis."""

    version: str
    durability: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The end of a run as the launcher saw it. cause: why it failed, "" when it did not.

    preparation_seconds: part of wall_seconds before the processes started. device_memory: most bytes of GPUs
    in use beyond those before the run, None without a GPU.
    """

    wall_seconds: float
    preparation_seconds: float = 0.0
    device_memory: int | None = None
    interrupted: bool
    cause: str
    accounts: Sequence[Account]
    redis: RedisFacts


def make_summary(plan: Plan, ending: Ending, learnt: Mapping[str, Any]) -> dict[str, Any]:
    """Return the summary as JSON values. learnt: the learner's account; its absent values become null."""
    summary = {
        "run": plan.settings.run,
        "workload": plan.settings.workload,
        "environment": plan.settings.environment.id,
        "seed": plan.settings.seed,
        "solved": bool(learnt.get("solved", False)),
        "target_return": plan.target,
        **{key: learnt.get(key) for key in _LEARNT},
        "wall_seconds": round(ending.wall_seconds, 3),
        "preparation_seconds": round(ending.preparation_seconds, 3),
        "peak_memory_bytes": together(account.memory for account in ending.accounts).peak,
        "device_memory_bytes": ending.device_memory,
        "interrupted": ending.interrupted,
        "processes": [_process(account) for account in ending.accounts],
        "redis": asdict(ending.redis),
    }
    found = {key: value for key, value in (learnt.get("findings") or {}).items() if key not in summary}
    return summary | found | ({"failure": ending.cause} if ending.cause else {})


def write_summary(run_dir: Path, summary: dict[str, Any]) -> None:
    replace_text(run_dir / SUMMARY_FILE, json.dumps(summary, indent=2) + "\n")


Row = tuple[str, str]


def summary_lines(summary: dict[str, Any]) -> list[str]:
    """Return the summary as lines for people, without lines for unknown values."""
    ledger, recording, redis = summary["ledger"], summary["recording"], summary["redis"]
    rows = [("run", f"{summary['run']} (seed {summary['seed']})"), ("ended", _ending(summary))]
    rows += [*_progress(summary), *_evaluation(summary["evaluation"] or {})]
    if summary["staleness"]:
        parts = ", ".join(f"{key} {_text(value, '.1f')}" for key, value in summary["staleness"].items())
        rows.append(("staleness", f"{parts} updates"))
    if ledger:
        rows.append(("ledger", _ledger(ledger)))
    if recording:
        text = (
            f"{recording['batches_taken']:,} batches from {recording['fragments']:,} fragments in "
            f"{recording['folder']}; no actor sent any, so the ledger is empty"
        )
        rows.append(("recording", text))
    rows += [("found", remark) for remark in summary.get("remarks", [])]
    rows.append(("CPU seconds", ", ".join(map(_process_text, summary["processes"]))))
    rows.append(("memory", _memory(summary)))
    rows.append(("redis", f"{redis['version']}, durability {redis['durability']}"))
    return [f"{summary['environment']}: {_verdict(summary)}", *aligned(rows)]


def aligned(rows: Iterable[Row]) -> list[str]:
    """Return rows as lines: a name, "" for a continuation of the row above, and a text."""
    return [f"  {name:<12} {text}" for name, text in rows]


def _progress(summary: dict[str, Any]) -> list[Row]:
    wall = f"{_seconds(summary['wall_seconds'])} in all"
    if summary["updates"] is None:
        return [("time", wall)]
    steps, rate = _text(summary["env_steps"]), _text(summary["env_steps_per_second"])
    rows = [
        ("steps", f"{steps} ({rate} per second)"),
        ("time", f"{_seconds(summary['training_seconds'])} of training, {wall}"),
    ]
    if (moment := summary["solved_at"]) is not None:
        when = f"{_seconds(moment['seconds'])} of training and {_text(moment['env_steps'])} steps"
        rows.append(("solved after", f"{when}, by version {moment['version']}"))
    version = _text(summary["policy_version"])
    rows.append(("updates", f"{_text(summary['updates'])}, policy version {version}"))
    among = "" if (ended := summary["training_episodes"]) is None else f", of {_text(ended)}"
    rows.append(("return", f"{shown(summary['mean_return'])} over the last 100 training episodes{among}"))
    return rows


def _memory(summary: dict[str, Any]) -> str:
    device, disk = summary["device_memory_bytes"], summary.get("disk_bytes")
    return (
        f"{size(summary['peak_memory_bytes'])} at most"
        + ("" if device is None else f", {size(device)} of GPU memory")
        + ("" if disk is None else f", {size(disk)} on disk")
    )


def _process(account: Account) -> dict[str, Any]:
    return {
        "role": account.role,
        "pid": account.pid,
        "restarts": account.restarts,
        "cpu_seconds": round(account.cpu_seconds, 3),
        "peak_memory_bytes": account.memory.peak,
    }


def _process_text(process: dict[str, Any]) -> str:
    again = f" (restarts: {process['restarts']})" if process["restarts"] else ""
    return f"{process['role']} {process['cpu_seconds']:.1f}{again}"


def _verdict(summary: dict[str, Any]) -> str:
    """Return the verdicts on what was learned, and whether the run was interrupted or missed its target."""
    if "failure" in summary:
        return "failed"
    if summary["solved"]:
        return "solved"
    base = (summary["evaluation"] or {}).get("base") or {}
    words = [summary.get("verdict"), _BASE_VERDICTS.get(base.get("verdict", ""))]
    if summary["interrupted"]:
        words.append("interrupted")
    elif summary["target_return"] is not None:
        words.append("not solved")
    return ", ".join(filter(None, words)) or "finished"


def _ending(summary: dict[str, Any]) -> str:
    ending = summary["ending"]
    if ending is None:
        why = "before the learner could say why"
    else:
        why = _ENDINGS.get(ending, f"the algorithm's own validation says {ending}")
    restored = summary["restored_from"]
    return why if restored is None else f"{why}; version {restored}, the best, was published again"


def _evaluation(evaluation: dict[str, Any]) -> list[Row]:
    """Return rows with the mean, and the comparison with the policy before training."""
    if not evaluation:
        return []
    mean, base = evaluation.get("mean"), evaluation.get("base")
    means = [
        f"{name} {shown(evaluation[name]['mean'])}"
        for name in ("deterministic", "sampled")
        if evaluation.get(name)
    ]
    ways = f" ({', '.join(means)})" if len(means) > 1 else ""
    played = f"over {evaluation.get('episodes')} episodes of version {evaluation.get('version')}{ways}"
    rows = [("evaluation", f"{shown(mean)} ± {shown(evaluation.get('std'), mean)} {played}")]
    if base is None:
        return rows
    mean, interval = base["mean"], ""
    if base["low"] is not None:
        interval = f" (95% interval {_signed(base['low'], mean)} to {_signed(base['high'], mean)})"
    spread = f"{shown(mean)} ± {shown(base['std'], mean)}"
    difference = f"{_signed(base['difference'], mean)}{interval}"
    return [
        *rows,
        ("base", f"{spread} before any training, on the same {base['episodes']} episodes"),
        ("difference", f"{difference}: {_BASE_VERDICTS[base['verdict']]}"),
        ("length", f"{base['version_length']:.1f} steps, of the base {base['length']:.1f}"),
    ]


def _signed(difference: float, like: float) -> str:
    return ("+" if difference > 0 else "") + shown(difference, like)


def _ledger(ledger: dict[str, Any]) -> str:
    dropped = ledger["dropped"]
    reasons = " (" + ", ".join(f"{key} {value}" for key, value in dropped.items() if value) + ")"
    total = sum(dropped.values())
    state = "balanced" if ledger["balanced"] else "NOT BALANCED"
    return (
        f"{state}: {ledger['acked']:,} acked = {ledger['trained']:,} trained + {total:,} dropped"
        f"{reasons if total else ''} + {ledger['resident']:,} resident"
    )


def _text(value: float | None, form: str = ",.0f") -> str:
    return "–" if value is None else format(value, form)


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} s"


# ---- The learner's final account, `learner.json`, as one attempt of a launcher sees it.

LEARNER_FILE: Final = "learner.json"


class LearnerAccount:
    """The final account of the learner of this attempt, `learner.json`."""

    def __init__(self, run_dir: Path) -> None:
        """Remember which file is there. run_dir: of the run, before its processes are started."""
        self._file = run_dir / LEARNER_FILE
        self._found = self._identity()

    def read(self) -> dict[str, Any]:
        """The account; empty while the learner of this attempt has written none."""
        if self._identity() in (None, self._found):
            return {}
        return dict(json.loads(self._file.read_text()))

    def _identity(self) -> tuple[int, int] | None:
        try:
            status = self._file.stat()
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns
