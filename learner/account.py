"""Where a run is, shown while it learns, and what it leaves: the final policy and `learner.json`."""

import json
import logging
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from penstock.learner.evaluation import Result, base_json, scores_json
from penstock.learner.ledger import Balance
from penstock.learner.publish.final_policy import FinalPolicy, name_final, write_final
from penstock.learner.publish.kept_versions import last
from penstock.policy import weights
from penstock.runtime import metrics

if TYPE_CHECKING:
    from penstock.learner.learner import Learner

_BALANCE_ATTEMPTS: Final = 100

log = logging.getLogger(__name__)


def snapshot(learner: "Learner") -> dict[str, Any]:
    """Return where the run is, by name: `publish_s` and `checkpoint_s` so far; callable from any thread."""
    renewal = learner.lease.renewal
    mean_return, episode_length = learner.episodes.means()
    return {
        "training_seconds": learner.clock.elapsed(),
        "env_steps": learner.ledger.env_steps,
        "updates": learner.algorithm.updates,
        "version": learner.publisher.latest.version,
        "publications": learner.publisher.count,
        "episodes": learner.episodes.count,
        "mean_return": mean_return,
        "episode_length": episode_length,
        "publish_s": learner.publisher.seconds,
        "checkpoint_s": learner.checkpoints.seconds,
        "log_bytes": renewal.log_bytes,
        "outstanding": renewal.outstanding,
        "budget": learner.model.pacing.budget,
        "evaluated": learner.evaluation.figures(),
    }


def describe(learner: "Learner") -> str:
    """Return what `Status` shows of the learner, a JSON object; may be called from any thread."""
    books = {"trained": learner.ledger.trained, "dropped": dict(learner.ledger.dropped)}
    return json.dumps(snapshot(learner) | {"ledger": books, "last_update": dict(learner.recorder.last)})


def close(learner: "Learner", ending: str, restored: Result | None, *, finished: bool) -> None:
    """Leave the final policy, the registered version and `learner.json`.

    ending: why learning ended. restored: the evaluation whose weights are the newest version again; None:
    those of the last update are. finished: whether the run is done, and not only this process.
    """
    final = _final(learner, restored)
    write_final(learner.run_dir, final)
    learner.kept.finish(last(final, learner.evaluation, learner.publisher.latest, ending))
    name_final(learner.run_dir)
    balance = _balance(learner)
    if not balance.balanced:
        log.error("the books do not balance", extra=asdict(balance))
    learner.recorder.finish(
        {"run": learner.model.specification.run, "ending": ending, "finished": finished}
        | _summary(learner, final, balance, restored)
    )
    if learner.recording is not None:
        learner.recording.close()


def _final(learner: "Learner", restored: Result | None) -> FinalPolicy:
    """Return the weights that solved the task, or else the newest ones, which may be the best ones again."""
    solved, newest = learner.evaluation.solved, learner.publisher.latest
    if solved is not None and restored is None:
        blob, version, update = solved.candidate.blob, solved.candidate.version, solved.candidate.update
    else:
        (module,) = learner.algorithm.published_modules().values()
        blob, version, update = weights.encode(module), newest.version, newest.update
    return FinalPolicy(specification=learner.model.specification, blob=blob, version=version, update=update)


def _balance(learner: "Learner") -> Balance:
    """The three counts at one moment: actors may still append while the log is walked."""
    learner_log = learner.learner_log
    for _ in range(_BALANCE_ATTEMPTS):
        acked, lost = learner_log.acked(), learner_log.log_lost()
        residue = learner_log.residue(learner.ledger.position)
        if (acked, lost) == (learner_log.acked(), learner_log.log_lost()):
            break
    metrics.LEDGER_RESIDENT.set(residue.entries)
    return learner.ledger.balance(acked=acked, lost=lost + residue.lost, resident=residue.entries)


def _summary(
    learner: "Learner", final: FinalPolicy, balance: Balance, restored: Result | None
) -> dict[str, Any]:
    here, evaluation, seconds = snapshot(learner), learner.evaluation, learner.clock.seconds()
    solved = evaluation.solved
    return {
        "solved": solved is not None,
        "target_return": learner.model.target,
        "mean_return": here["mean_return"],
        "evaluation": _evaluation_json(restored or solved or evaluation.last),
        "best_checkpoint": evaluation.checkpoints()[0] or None,
        "restored_from": None if restored is None else restored.candidate.version,
        "env_steps": here["env_steps"],
        "updates": here["updates"],
        "policy_version": final.version,
        "training_seconds": round(seconds, 3),
        "solved_at": None if solved is None else _moment_json(restored or solved),
        "env_steps_per_second": round(here["env_steps"] / max(seconds, 1e-9), 1),
        "staleness": learner.recorder.staleness.quantiles(),
        "ledger": {
            "acked": balance.acked,
            "trained": balance.trained,
            "dropped": balance.dropped,
            "resident": balance.resident,
            "balanced": balance.balanced,
        },
        "recording": _recording_json(learner),
        "findings": learner.algorithm.findings(),
    }


def _recording_json(learner: "Learner") -> dict[str, Any] | None:
    """Return what the run learned from in place of actors; the ledger of such a run is empty."""
    recording = learner.model.recording
    if recording is None:
        return None
    return {
        "folder": str(recording.folder),
        "run": recording.specification.run,
        "fragments": len(recording.fragments),
        "steps": sum(place.charge for place in recording.fragments),
        "batches_taken": learner.position.recorded,
    }


def _moment_json(solved: Result) -> dict[str, Any]:
    candidate = solved.candidate
    return {
        "seconds": round(candidate.at_s, 3),
        "env_steps": candidate.env_steps,
        "version": candidate.version,
    }


def _evaluation_json(result: Result | None) -> dict[str, Any] | None:
    if result is None:
        return None
    return {
        "mean": result.mean,
        "std": result.std,
        "episodes": result.episodes,
        "version": result.candidate.version,
        "env_steps": result.candidate.env_steps,
        **scores_json(result),
        "base": base_json(result),
    }
