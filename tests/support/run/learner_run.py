"""A learner under test and its torch-free producers, before one real Redis server.

`Producer` speaks to the store as the broker would: sessions, credit, fragments of random experience with
the newest published weights named in their headers. `LearnerThread` runs
`penstock.learner.entry.main` here; `learner_process` runs `penstock learner` as a process that can be
killed.
"""

import asyncio
import json
import threading
import time
import zlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np

from penstock.actor.link.ack_journal import AckJournal
from penstock.broker.log.replies import Answer, Appended, AppendItem, Command, Status
from penstock.broker.log.store import Store, StoreUnavailable
from penstock.config.settings import Settings, load
from penstock.launch.audit.audit_command import audit
from penstock.learner.checkpoint.resume_options import ResumeOptions
from penstock.learner.checkpoint.store import Checkpoint, CheckpointStore
from penstock.learner.entry import main
from penstock.protocol import fragment as wire
from penstock.protocol.fragment import FragmentHeader, Kind, Slot, WeightSpan
from penstock.protocol.messages import Credit, Episode, Publication, Report, Role, Watch
from penstock.protocol.refusal import Refusal
from penstock.protocol.schema import fragment_schema
from penstock.protocol.spaces import Box, Discrete
from penstock.protocol.tensor import Array
from penstock.runtime.lifecycle import Lifecycle
from tests.support.run.forked_process import ForkedProcess

T = TypeVar("T")

RUN = "run-l"
STEPS, SLOTS = 4, 2
CHARGE = STEPS * SLOTS
BATCH = 4 * CHARGE
PATIENCE_S = 60.0
CARTPOLE_HIGH = np.array([4.8, np.inf, 0.41887903, np.inf], np.float32)
SCHEMA = fragment_schema(Box(-CARTPOLE_HIGH, CARTPOLE_HIGH), Discrete(2))


def settings(**over: Any) -> Settings:
    """A small run on CartPole's spaces: fragments of 4 × 2 steps, of PPO batches of four fragments."""
    ppo = {"batch_steps": BATCH, "epochs": 2, "minibatches": 2, "staleness": 1}
    base = {
        "run": RUN,
        "environment": {"id": "CartPole-v1", "count": SLOTS},
        "actor": {"unroll_length": STEPS, "count": 1},
        "policy": {"hidden_sizes": [8], "normalise_observations": True},
        "algorithm": {} if "name" in over.get("algorithm", {}) else ppo,
        "learner": {"checkpoint_interval_s": 3600, "total_steps": 20 * BATCH, "stop_at_target": False},
        "evaluation": {"timeout_s": 1, "episodes": 2},
        "broker": {"redis_wait_s": 20},
    }
    return load([base, over])


def endless(**learner: Any) -> Settings:
    """A run that only ends when it is asked to, and drops what is three updates old."""
    return settings(learner={"total_steps": 10**9} | learner, algorithm={"stale_after": 3})


def until(condition: Callable[[], Any], what: str) -> Any:
    """The first true value of `condition`; AssertionError names `what` after PATIENCE_S."""
    deadline = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {PATIENCE_S:g} s for {what}"
        time.sleep(0.005)
    return value


class Producer:
    """Any number of rollout sessions over one store; every call blocks."""

    def __init__(self, url: str, run_dir: Path | None = None) -> None:
        """run_dir: in whose folder `journals` it records, as actors do, what was acknowledged."""
        self._run_dir = run_dir
        self._journals: dict[int, AckJournal] = {}
        self._runner = asyncio.Runner()
        self._store = Store.connect(url)
        self._sequences: dict[int, int] = {}
        self._leaves: dict[int, Credit] = {}
        self._reports: dict[int, int] = {}
        self._seeds: dict[int, int] = {}
        self._latest = Publication()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._runner.run(self._store.aclose())
        self._runner.close()

    def open(self, actor_id: str = "actor-0", role: Role = Role.ROLLOUT, data: str = "") -> int:
        """A session, once the learner has opened the run; equal `data` gives equal experience."""

        def attempt() -> Any:
            opened = self._call(lambda: self._store.open_session(actor_id, role))
            return None if isinstance(opened, Refusal) else opened

        opened = until(attempt, "a session")
        self._sequences[opened.session], self._leaves[opened.session] = 0, opened.credit
        if self._run_dir is not None:
            self._journals[opened.session] = AckJournal(self._run_dir / "journals", RUN, actor_id)
        self._seeds[opened.session] = zlib.crc32(data.encode()) if data else opened.session
        return int(opened.session)

    def send(self, session: int, *, count: int = 1, **header: Any) -> Appended:
        first = self._sequences[session] + 1
        items = [self._item(session, sequence, **header) for sequence in range(first, first + count)]
        reply = self._call(lambda: self._store.append(session, first - 1, items))
        if session in self._journals:
            taken = [item for item in items if item.header.sequence <= reply.acked_through]
            self._journals[session].record([wire.Fragment(item.header, item.payload) for item in taken])
        self._sequences[session] = max(self._sequences[session], reply.acked_through)
        self._leaves[session] = reply.credit
        return reply

    def send_with_credit(self, session: int, most: int = 32, /, **header: Any) -> int:
        """Append all that there is credit for now, at most `most`; how many that were."""
        credit = self._watch(session)
        count = min(credit.begin_through - self._sequences[session], most)
        if count > 0:
            self.send(session, count=count, round_=credit.round, **header)
        return max(count, 0)

    def drive(self, sessions: list[int], done: Callable[[], bool], **header: Any) -> None:
        until(
            lambda: done() or (sum(self.send_with_credit(s, **header) for s in sessions) < 0),
            "the run to go on",
        )

    @property
    def acked(self) -> int:
        return sum(self._sequences.values())

    def close(self, session: int) -> None:
        self._call(lambda: self._store.close_session(session))

    def report(
        self, session: int, returns: list[float], *, version: int = 1, evaluation: bool = False
    ) -> None:
        sequence = self._reports.get(session, 0) + 1
        episodes = tuple(
            Episode(
                slot_id=slot,
                episode_id=sequence,
                episode_return=value,
                length=10,
                terminated=True,
                version=version,
            )
            for slot, value in enumerate(returns)
        )
        report = Report(
            session=session,
            sequence=sequence,
            evaluation=evaluation,
            deterministic=evaluation,
            episodes=episodes,
        )
        assert self._call(lambda: self._store.report(report))[1] is None
        self._reports[session] = sequence

    def answer_probe(self, session: int, log_prob: tuple[float, ...]) -> None:
        latest = self.status().latest
        watch = Watch(
            session=session,
            applied_version=latest.version,
            applied_sha256=latest.sha256,
            probe_log_prob=log_prob,
        )
        assert self._call(lambda: self._store.watch(watch)).refusal is None

    def status(self) -> Status:
        return self._call(lambda: self._store.status())

    def control(self, action: Any) -> None:
        self._call(lambda: self._store.control(action, "test"))

    def ask(self, action: Any, argument: str = "", request_id: str = "") -> Command:
        """Give the learner a command, and return it as it stands; its id is made of both by default."""
        request_id = request_id or f"{action}-{argument}".rstrip("-")
        return self._call(lambda: self._store.command(action, argument, request_id, "test"))[0]

    def answer(self, action: Any, argument: str = "", request_id: str = "") -> Answer:
        found: Answer = until(lambda: self.ask(action, argument, request_id).answer, f"an answer to {action}")
        return found

    def evaluate_version(self, session: int) -> int:
        watched = self._call(lambda: self._store.watch(Watch(session=session)))
        return watched.news.evaluate_version if watched.news is not None else 0

    def flush_wanted(self, session: int, flushed: int = 0) -> int:
        """Which flush the session is asked for. flushed: the newest that it says it has answered."""
        watched = self._call(lambda: self._store.watch(Watch(session=session, flushed=flushed)))
        return watched.news.flush if watched.news is not None else 0

    def _call(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The reply, whatever happens to Redis meanwhile: every call is safe to repeat."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return self._runner.run(call())
            except StoreUnavailable:
                assert time.monotonic() < deadline, "Redis did not come back"
                time.sleep(0.02)

    def refusal(self, session: int) -> str:
        """Why a watch of the session is refused; "" where it is not."""
        return str(self._call(lambda: self._store.watch(Watch(session=session))).refusal or "")

    def open_refusal(self, actor_id: str) -> str:
        """Why the actor gets no session; "" where it gets one."""
        opened = self._call(lambda: self._store.open_session(actor_id, Role.ROLLOUT))
        return str(opened) if isinstance(opened, Refusal) else ""

    def _watch(self, session: int) -> Credit:
        watched = self._call(lambda: self._store.watch(Watch(session=session)))
        if watched.news is not None:
            self._leaves[session] = watched.news.credit
        return self._leaves[session]

    def _item(
        self, session: int, sequence: int, *, update: int | None = None, round_: int = 0, **tensors: Array
    ) -> AppendItem:
        latest = self._latest = max(self._latest, self.status().latest, key=lambda one: one.version)
        header = FragmentHeader(
            run=RUN,
            session=session,
            sequence=sequence,
            schema_id=SCHEMA.schema_id,
            steps=STEPS,
            slots=tuple(Slot(slot, 0, (sequence - 1) * STEPS) for slot in range(SLOTS)),
            weights=(
                WeightSpan(0, 0, STEPS, max(1, latest.version), latest.update if update is None else update),
            ),
            tensors=(),
            kind=Kind.TRAIN,
            created_us=time.time_ns() // 1000,
            round=round_,
        )
        fragment = wire.build(header, random_arrays(sequence, self._seeds[session]) | tensors)
        return AppendItem(
            header=fragment.header, header_bytes=wire.header_bytes(fragment.header), payload=fragment.payload
        )


def random_arrays(*seed: int, steps: int = STEPS, slots: int = SLOTS) -> dict[str, Array]:
    """Every tensor of a full fragment without ended episodes; equal seeds give equal arrays."""
    generator = np.random.default_rng(seed)
    leading = {1: (steps, slots), 2: (steps + 1, slots), 3: (slots,), 4: (0,)}
    arrays: dict[str, Array] = {
        rule.name: np.zeros((*leading[rule.axes.value], *rule.shape), rule.dtype) for rule in SCHEMA.tensors
    }
    arrays["observation"] = generator.normal(size=arrays["observation"].shape).astype(np.float32)
    arrays["action"] = generator.integers(2, size=arrays["action"].shape)
    arrays["reward"] = generator.normal(size=(steps, slots)).astype(np.float32)
    arrays["log_prob"] = np.full((steps, slots), np.log(0.5), np.float32)
    arrays["valid"] = np.ones((steps, slots), bool)
    return arrays


class LearnerThread:
    """`penstock.learner.entry.main` in a thread of this process."""

    def __init__(
        self,
        url: str,
        run_dir: Path,
        given: Settings,
        *,
        resume: bool = False,
        allow_loss: bool = False,
        best: bool = False,
    ) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.run_dir = run_dir
        self.lifecycle = Lifecycle("learner")
        self.error: BaseException | None = None
        self.code: int | None = None
        resumption = ResumeOptions(resume=resume, allow_loss=allow_loss, best=best)
        arguments = {"redis_url": url, "run_dir": run_dir, "resumption": resumption}
        self._thread = threading.Thread(target=self._run, args=(given, arguments), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.lifecycle.drain("the test is over")
        self._thread.join(PATIENCE_S)
        if error is not None and self.error is not None and error is not self.error:
            error.add_note(f"the learner had ended: {self.error!r}")

    @property
    def ended(self) -> bool:
        """Whether main has returned or raised."""
        return self.code is not None or self.error is not None

    def drain(self) -> dict[str, Any]:
        """Ask it to end as SIGTERM does; its account."""
        self.lifecycle.drain("test")
        return self.finish()

    def finish(self) -> dict[str, Any]:
        """Wait for its end; its account, whose books balance."""
        self._thread.join(PATIENCE_S)
        if self.error is not None:
            raise self.error
        assert self.code == 0, "the learner did not end in time"
        told = account(self.run_dir)
        assert told["ledger"]["balanced"], told["ledger"]
        return told

    def _run(self, given: Settings, arguments: dict[str, Any]) -> None:
        try:
            self.code = main(self.lifecycle, given, **arguments)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.error = error


def audited(run_dir: Path, url: str) -> dict[str, int]:
    """Where everything went that was acknowledged to producers; AssertionError unless the books are whole."""
    verdict = audit(run_dir, redis=url)
    assert verdict.clean, [str(problem) for problem in verdict.problems]
    return verdict.journalled


def account(run_dir: Path) -> dict[str, Any]:
    return dict(json.loads((run_dir / "learner.json").read_text()))


def learner_process(url: str, run_dir: Path, given: Settings, *flags: str) -> ForkedProcess:
    """The learner as a process of its own; its log is `learner.log` in the run's folder."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "settings.json").write_text(given.model_dump_json(exclude_none=True))
    program = (
        "import json, pathlib, sys\n"
        "from penstock.learner.checkpoint.resume_options import ResumeOptions\n"
        "from penstock.learner.entry import main\n"
        "from penstock.runtime.lifecycle import run_service\n"
        "from penstock.config.settings import load\n"
        "url, folder, *flags = sys.argv[1:]\n"
        "given = load([json.loads((pathlib.Path(folder) / 'settings.json').read_text())])\n"
        "body = lambda lifecycle: main(lifecycle, given, redis_url=url, run_dir=pathlib.Path(folder), "
        "resumption=ResumeOptions(resume='--resume' in flags, allow_loss='--allow-loss' in flags))\n"
        "sys.exit(run_service(body, 'learner'))\n"
    )
    return ForkedProcess(program, url, str(run_dir), *flags, output=run_dir / "learner.log")


def newest(run_dir: Path) -> Checkpoint:
    """The newest checkpoint on disk."""
    store = CheckpointStore(run_dir / "checkpoints", 3)
    return store.read(store.ids()[0])


def checkpoint_now(producer: Producer, run_dir: Path) -> Checkpoint:
    """Ask the running learner for a checkpoint and wait for it."""
    store = CheckpointStore(run_dir / "checkpoints", 3)
    before = store.ids()
    producer.control("checkpoint")
    until(lambda: store.ids() != before, "a checkpoint")
    return newest(run_dir)


def updated(producer: Producer, session: int, updates: int) -> None:
    """Drive the run so many updates on."""
    through = producer.status().latest.update + updates
    producer.drive([session], lambda: producer.status().latest.update >= through)
