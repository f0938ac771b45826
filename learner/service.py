"""The learner as a process: takes the lease, begins or resumes the run, learns, leaves the books.

Waits for Redis and for the lease; needs no broker and no actor to be up. Returns when the target is
reached, the steps are done, an operator stopped the run or the process is asked to drain, each after a
committed checkpoint. A learner that was fenced off, or that cannot go on, raises Fatal and writes
nothing more. After a crash, `resume` goes on from the newest committed checkpoint.
"""

import json
import logging
import socket
import threading
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from broker.learner_log import LearnerLog
from broker.state import Lease, LogState
from learner.algorithm import AlgorithmState
from learner.checkpoint import CheckpointStore
from learner.crew import Crew
from learner.episodes import Episodes
from learner.evaluation import Evaluation, Result
from learner.feed import Feed, FeedStart
from learner.final_policy import FinalPolicy, write_final
from learner.keeper import Keeper
from learner.lease import LeaseKeeper, acquire
from learner.ledger import Balance
from learner.loop import UPDATE, Ending, Loop, Parts, Plan
from learner.model import Model, make_model, use_threads
from learner.progress import check_same, sections
from learner.publisher import Publisher
from learner.recorder import Recorder, Staleness, ledger_json
from learner.resume import Beginning, choose
from learner.training_clock import TrainingClock
from penstock.policy import weights
from penstock.runtime import metrics
from penstock.runtime.exit import EXIT_OK
from penstock.runtime.health import Health, announce, serve_http
from penstock.runtime.lifecycle import Lifecycle
from penstock.runtime.retry import Interrupted
from penstock.runtime.settings import ConfigurationError, Settings

_JOIN_S: Final = 2.0
_BALANCE_ATTEMPTS: Final = 100

log = logging.getLogger(__name__)


def main(
    lifecycle: Lifecycle,
    settings: Settings,
    *,
    redis_url: str,
    run_dir: Path,
    resume: bool,
    allow_loss: bool,
) -> int:
    """Run the learner; exit code. Raises Fatal or ConfigurationError, as `run_service` expects."""
    if not settings.run:
        raise ConfigurationError("run='': name the run; actors, checkpoints and Redis know it by its name")
    health = Health("learner")
    _, port = serve_http(health, settings.metrics.host, settings.metrics.port)
    announce("learner", metrics_port=port)
    use_threads(settings)
    model = make_model(settings)
    password = settings.security.redis_password
    try:
        learner_log = LearnerLog.connect(
            redis_url,
            wait_s=settings.broker.redis_wait_s,
            stop=lifecycle.draining,
            password=None if password is None else password.get_secret_value(),
        )
        lease = acquire(
            learner_log, settings.run, _holder(run_dir), settings.learner.lease_ttl_s, lifecycle.draining
        )
    except Interrupted:
        return EXIT_OK
    metrics.LEASE_EPOCH.set(lease.epoch)
    store = CheckpointStore(run_dir / "checkpoints", settings.learner.keep_checkpoints)
    beginning = choose(lease, store, resume=resume, allow_loss=allow_loss)
    _restore(model, beginning, settings)
    _open(learner_log, lease, model, beginning)
    process = _assemble(settings, model, learner_log, store, beginning, health, lifecycle, run_dir)
    return process.run()


def _holder(run_dir: Path) -> str:
    """The same for every process of this learner, so that a restarted one takes its own lease over at once."""
    return f"{socket.gethostname()}:{run_dir.resolve()}"


def _restore(model: Model, beginning: Beginning, settings: Settings) -> None:
    if beginning.checkpoint is None or beginning.progress is None:
        return
    check_same(settings.run, beginning.progress.sections, sections(settings))
    model.algorithm.load(
        AlgorithmState(tensors=beginning.checkpoint.tensors, numbers=beginning.progress.numbers)
    )


def _open(learner_log: LearnerLog, lease: Lease, model: Model, beginning: Beginning) -> None:
    known = beginning.progress.log if beginning.progress is not None else None
    state: LogState | None = None
    if known is not None:
        # The checkpoint holds the log as it was before its own commit.
        state = replace(known, commits=(*known.commits, beginning.lineage[-1]))
    if lease.closed and not lease.fresh:
        log.warning("Redis was restarted: opening the log again")
    learner_log.start(
        model.specification.encode(), model.pacing, resume=state, position=beginning.ledger.position
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Process:
    """All parts of a learner that has the lease."""

    settings: Settings
    model: Model
    learner_log: LearnerLog
    parts: Parts
    loop: Loop
    run_dir: Path

    def run(self) -> int:
        parts = self.parts
        parts.crew.start("publisher", parts.publisher.run)
        self.loop.publish_first()
        parts.crew.start("lease", parts.lease.run)
        parts.crew.start("feed", parts.feed.run)
        parts.crew.start("episodes", parts.episodes.run)
        parts.health.watch(UPDATE, self.settings.learner.stall_timeout_s)
        parts.health.set_ready(True)
        try:
            ending = self.loop.run()
            self._account(ending)
        finally:
            parts.crew.join(_JOIN_S)
        parts.crew.check()
        self.learner_log.release()
        self.learner_log.close()
        return EXIT_OK

    def _account(self, ending: Ending) -> None:
        final = self._final()
        write_final(self.run_dir, final)
        balance = self._balance()
        if not balance.balanced:
            log.error("the books do not balance", extra=asdict(balance))
        self.parts.recorder.finish(self._summary(ending, final, balance))

    def _final(self) -> FinalPolicy:
        """What solved the task where something did, else the newest weights."""
        solved, newest = self.parts.evaluation.solved, self.parts.publisher.latest
        if solved is not None:
            blob, version, update = solved.candidate.blob, solved.candidate.version, solved.candidate.update
        else:
            (module,) = self.parts.algorithm.published_modules().values()
            blob, version, update = weights.encode(module), newest.version, newest.update
        return FinalPolicy(specification=self.model.specification, blob=blob, version=version, update=update)

    def _balance(self) -> Balance:
        """The three counts at one moment: actors may still append while the log is walked."""
        learner_log, ledger = self.learner_log, self.parts.ledger
        for _ in range(_BALANCE_ATTEMPTS):
            acked, lost = learner_log.acked(), learner_log.log_lost()
            resident = learner_log.resident(ledger.position)
            if (acked, lost) == (learner_log.acked(), learner_log.log_lost()):
                break
        metrics.LEDGER_RESIDENT.set(resident)
        return ledger.balance(acked=acked, lost=lost, resident=resident)

    def _summary(self, ending: Ending, final: FinalPolicy, balance: Balance) -> dict[str, Any]:
        moment, evaluation = self.loop.moment(), self.parts.evaluation
        solved = evaluation.solved
        seconds = moment.training_seconds if solved is None else solved.candidate.at_s
        return {
            "run": self.settings.run,
            "ending": ending.value,
            "finished": ending.finished,
            "solved": solved is not None,
            "target_return": self.model.target,
            "mean_return": moment.mean_return,
            "evaluation": _evaluation_json(solved or evaluation.last),
            "env_steps": moment.env_steps,
            "updates": moment.updates,
            "policy_version": final.version,
            "training_seconds": round(seconds, 3),
            "env_steps_per_second": round(moment.env_steps / max(moment.training_seconds, 1e-9), 1),
            "staleness": self.parts.recorder.staleness.quantiles(),
            "ledger": ledger_json(balance),
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
    }


def _assemble(
    settings: Settings,
    model: Model,
    learner_log: LearnerLog,
    store: CheckpointStore,
    beginning: Beginning,
    health: Health,
    lifecycle: Lifecycle,
    run_dir: Path,
) -> _Process:
    crew, reopened = Crew(), threading.Event()
    progress, ledger = beginning.progress, beginning.ledger
    description: list[Loop] = []
    lease = LeaseKeeper(
        learner_log,
        settings.learner.lease_ttl_s,
        stop=crew.stop,
        quarantine=model.quarantine,
        on_reopened=reopened.set,
        description=lambda: json.dumps(asdict(description[0].moment())),
    )
    evaluation = Evaluation(settings.evaluation, model.target, stop_at_target=settings.learner.stop_at_target)
    episodes = Episodes(learner_log, lease, evaluation, crew.stop)
    if progress is not None:
        episodes.restore(progress.episodes)
    start = FeedStart(
        position=ledger.position,
        turn=model.algorithm.updates,
        round=progress.round if progress is not None else 0,
    )
    parts = Parts(
        algorithm=model.algorithm,
        feed=_feed(settings, model, learner_log, lease, start, crew),
        publisher=Publisher(learner_log, lease, model.quarantine, evaluation.requested, crew.stop),
        lease=lease,
        ledger=ledger,
        keeper=Keeper(
            store,
            learner_log,
            lease,
            ledger,
            lineage=beginning.lineage,
            lineage_path=run_dir / "lineage.jsonl",
            interval_s=settings.learner.checkpoint_interval_s,
            room=model.room,
        ),
        evaluation=evaluation,
        episodes=episodes,
        recorder=Recorder(
            run_dir, Staleness(progress.staleness if progress is not None else None), ledger.env_steps
        ),
        clock=TrainingClock(progress.training_seconds if progress is not None else 0.0),
        crew=crew,
        health=health,
        draining=lifecycle.draining,
        reopened=reopened,
    )
    loop = Loop(parts, _plan(settings, model, run_dir), start.round)
    description.append(loop)
    return _Process(
        settings=settings, model=model, learner_log=learner_log, parts=parts, loop=loop, run_dir=run_dir
    )


def _feed(
    settings: Settings,
    model: Model,
    learner_log: LearnerLog,
    lease: LeaseKeeper,
    start: FeedStart,
    crew: Crew,
) -> Feed:
    return Feed(
        learner_log,
        lease,
        model.algorithm,
        model.quarantine,
        run_name=settings.run,
        schema=model.specification.schema,
        budget=model.pacing.budget,
        device=model.device,
        prefetch=settings.learner.prefetch_batches,
        start=start,
        stop=crew.stop,
    )


def _plan(settings: Settings, model: Model, run_dir: Path) -> Plan:
    return Plan(
        run=settings.run,
        sections=sections(settings),
        total_steps=settings.learner.total_steps,
        stop_at_target=settings.learner.stop_at_target,
        evaluation_timeout_s=settings.evaluation.timeout_s,
        budget=model.pacing.budget,
        evidence_dir=str(run_dir / "evidence"),
    )
