"""Experience of clients on its way to the learner: segments of episodes become fragments in the outbox.

Answers never wait for training. Steps that cannot be learned from are answered all the same and counted by
reason:

    arm         the client follows a version that is not the learner's newest
    unasked     the client does not want its steps learned from
    full        the outbox, or the memory for open episodes, is full
    too_large   a reward or log-probability lies beyond what the run's broker takes
    stale       it waited until the learner was too many updates ahead
    abandoned   the client never reported the outcome
    lost        the session ended while it was under way
    reward      the potential that shapes its rewards gives no finite numbers
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np

from penstock.actor.acting.masks import LearnerReward, PotentialError
from penstock.actor.link.ack_journal import AckJournal, SampleJournal
from penstock.actor.link.broker_client import BrokerClient
from penstock.actor.link.outbox import FragmentQueue, Outbox, Queued, fill_message
from penstock.actor.link.session import Session, open_session
from penstock.actor.serving.batcher import Loaded, Question
from penstock.actor.serving.episodes import CallerShares, Episode, Row, Segment
from penstock.actor.serving.loaded_versions import Weights
from penstock.config.settings import ServingSection
from penstock.protocol.fragment import MOST, Fragment
from penstock.protocol.limits import MAX_FRAGMENTS_PER_APPEND, SERVER_FLUSH_S
from penstock.protocol.messages import Episode as Played
from penstock.protocol.messages import Publication, Role, RunState
from penstock.protocol.specification import RunSpecification
from penstock.runtime import metrics
from penstock.runtime.exit import Fatal
from penstock.runtime.lifecycle import Lifecycle

# ---- Fragments of the policy server on their way to the broker: never waited for, numbered when they are
# sent.

_MOST_EPISODES: Final = 16_384


class ServedQueue:
    """Fragments that wait for their number, and episodes for their report, over all sessions. Thread-safe."""

    def __init__(self, capacity: int, stale_after: int) -> None:
        """stale_after: updates that the learner may be ahead of one; 0: any."""
        self._capacity, self._stale_after = capacity, stale_after
        self._lock = threading.Lock()
        self._waiting: deque[Fragment] = deque()
        self.put_count = 0
        self.gone_count = 0
        """How many of the fragments put were acknowledged or dropped, in the order in which they came."""
        self.episodes: deque[Played] = deque(maxlen=_MOST_EPISODES)

    def __len__(self) -> int:
        return len(self._waiting)

    def note_gone(self, count: int) -> None:
        with self._lock:
            self.gone_count += count

    def put(self, fragment: Fragment, *, even_when_full: bool = False) -> bool:
        """Keep a fragment until it is sent; False when the queue is full, and it is not kept."""
        with self._lock:
            if len(self._waiting) >= self._capacity and not even_when_full:
                return False
            self._waiting.append(fragment)
            self.put_count += 1
            return True

    def exchange(self, refused: Sequence[Fragment], update: int) -> list[Fragment]:
        """Put the refused back and take the oldest that fit a message; drops and counts what is too old."""
        with self._lock:
            self._waiting.extendleft(reversed(refused))
            while self._waiting and self._is_stale(self._waiting[0], update):
                count_not_learned("stale", self._waiting.popleft().header.steps)
                self.gone_count += 1
            batch = fill_message(islice(self._waiting, MAX_FRAGMENTS_PER_APPEND))
            for _ in batch:
                self._waiting.popleft()
            return batch

    def drop_waiting(self) -> None:
        """Drop all of it, counted as lost: no session follows."""
        with self._lock:
            count_not_learned("lost", sum(fragment.header.steps for fragment in self._waiting))
            self.gone_count += len(self._waiting)
            self._waiting.clear()

    def _is_stale(self, fragment: Fragment, update: int) -> bool:
        return 0 < self._stale_after < update - fragment.header.oldest_update


class NumberedWhenSent(FragmentQueue):
    """The part of a `ServedQueue` that one session sends, numbered in that session."""

    def __init__(self, queue: ServedQueue) -> None:
        super().__init__(0)
        self._queue = queue
        self._is_dropped = False
        self.episodes = queue.episodes

    def __len__(self) -> int:
        return len(self._queue) + super().__len__()

    def put(self, fragment: Fragment, *, even_when_full: bool = False) -> bool:
        return self._queue.put(fragment, even_when_full=even_when_full)

    def claim_next(self, session: int, first: int, update: int) -> list[Fragment]:
        """Number the oldest now; a refused fragment is numbered anew, since nothing of it was stored."""
        if self._is_dropped:
            return []
        taken = self._queue.exchange([queued.fragment for queued in self._queued], update)
        batch = [
            replace(fragment, header=replace(fragment.header, session=session, sequence=sequence))
            for sequence, fragment in enumerate(taken, first)
        ]
        now = time.monotonic()
        self._queued = deque(Queued(fragment, now) for fragment in batch)
        return batch

    def acknowledge(self, sequence: int) -> list[Queued]:
        taken = super().acknowledge(sequence)
        self._queue.note_gone(len(taken))
        return taken

    def drop(self) -> list[Fragment]:
        """Drop the fragments under way, counted as lost; the next session sends those without a number."""
        dropped = super().drop()
        self._is_dropped = True
        self._queue.note_gone(len(dropped))
        count_not_learned("lost", sum(fragment.header.steps for fragment in dropped))
        return dropped


def count_not_learned(reason: str, steps: int) -> None:
    metrics.NOT_LEARNED_STEPS.labels(reason).inc(steps)


REASONS: Final = ("arm", "unasked", "full", "too_large", "stale", "abandoned", "lost", "reward")

STEP_BYTES: Final = 512
"""Memory of a step without its arrays: tables of names, places in lists."""
ARRAY_BYTES: Final = 160
"""Memory of an array without its numbers. For small observations these two are nearly all."""

log = logging.getLogger(__name__)


class Learning:
    """Collects the steps of episodes, in one event loop. on_queued: called when a fragment was queued."""

    def __init__(
        self,
        specification: RunSpecification,
        section: ServingSection,
        queue: ServedQueue,
        on_queued: Callable[[], None],
        *,
        compress: bool,
        reward: LearnerReward | None = None,
    ) -> None:
        self._reward = reward
        self._specification, self._section, self._queue = specification, section, queue
        self._on_queued, self._compress = on_queued, compress
        schema = specification.schema
        self._state = [rule.name for rule in schema.under("state")]
        self._masks = {rule.name: rule.shape for rule in schema.under("mask")}
        self._buffered = CallerShares(section.max_buffered_bytes)
        self._ripening: deque[tuple[float, Episode, Segment]] = deque()
        for reason in REASONS:
            # A series that begins with its first event hides that event.
            count_not_learned(reason, 0)

    def step(
        self,
        episode: Episode,
        question: Question,
        action: Row,
        log_prob: float | None,
        loaded: Loaded,
        now_s: float,
    ) -> None:
        """Take a step of an episode that is learned from, as long as there is memory for it."""
        observation, state = question.observation, {}
        if self._state or self._masks:
            state = {name: observation[name] for name in self._state}
            rest = {name: row for name, row in observation.items() if name not in state}
            observation = rest | self._masks_of(question)
        sizes = [array.nbytes for row in (observation, action) for array in row.values()]
        size = STEP_BYTES + ARRAY_BYTES * len(sizes) + sum(sizes)
        if not self._buffered.fits(episode.owner, size):
            self.stop(episode, "full", now_s)
            return
        weights = (loaded.version, loaded.update)
        self._take(
            episode, episode.segment_builder.step(observation, action, log_prob, weights, now_s, state), now_s
        )
        assert episode.segment_builder.open is not None
        episode.segment_builder.open.bytes += size
        self._buffered.add(episode.owner, size)

    @property
    def takes_masks(self) -> bool:
        """Return whether what was drawn under an action mask can be learned from."""
        return bool(self._masks)

    def _masks_of(self, question: Question) -> dict[str, Any]:
        """Masks by the schema's names, [1, n]; what came without one was free."""
        given = question.masks or {}
        return {
            name: given.get(name.removeprefix("mask/"), np.ones((1, *shape), np.bool_))
            for name, shape in self._masks.items()
        }

    def end(self, episode: Episode, *, terminated: bool, final: Row | None, now_s: float) -> None:
        self._take(episode, episode.segment_builder.end(terminated=terminated, final=final), now_s)
        if episode.segment_builder.length:
            self._report(episode, terminated=terminated)

    def give_up(self, episode: Episode, now_s: float) -> None:
        """End an episode whose last step has no outcome; the steps before it are learned from."""
        last = episode.segment_builder.open
        if last is None:
            return
        count_not_learned("abandoned", 1)
        segment = episode.segment_builder.give_up()
        if segment is None:
            self._buffered.add(episode.owner, -last.bytes)
        self._take(episode, segment, now_s)

    def flush(self, episodes: Iterable[Episode], now_s: float) -> None:
        """Cut the segments of open episodes; each still waits for the end of its reward window."""
        for episode in episodes:
            if episode.learned:
                self._take(episode, episode.segment_builder.cut(), now_s)

    def stop(self, episode: Episode, reason: str, now_s: float) -> None:
        """Learn from neither this step nor the rest of the episode; earlier steps are kept."""
        self.give_up(episode, now_s)
        episode.learned, episode.unlearned_as = False, reason
        episode.segment_builder.skip(now_s)
        count_not_learned(reason, 1)

    def _take(self, episode: Episode, segment: Segment | None, now_s: float) -> None:
        """Take a segment that was cut; it becomes a fragment once its reward window is over."""
        if segment is None:
            return
        if self._section.reward_window_s == 0.0:
            self._send(episode, segment)
            return
        episode.ripening.append(segment)
        self._ripening.append((now_s + self._section.reward_window_s, episode, segment))

    def ripen(self, now_s: float) -> None:
        """Send segments whose reward window is over; at infinity all of them."""
        while self._ripening and self._ripening[0][0] <= now_s:
            _, episode, segment = self._ripening.popleft()
            episode.ripening.remove(segment)
            self._send(episode, segment)

    def _report(self, episode: Episode, *, terminated: bool) -> None:
        metrics.EPISODE_RETURN.observe(episode.total_return)
        metrics.EPISODE_LENGTH_STEPS.observe(episode.segment_builder.length)
        metrics.EPISODES.labels("no").inc()
        self._queue.episodes.append(
            Played(
                slot_id=episode.lane,
                episode_id=episode.number,
                episode_return=episode.total_return,
                length=episode.segment_builder.length,
                terminated=terminated,
                version=episode.version,
            )
        )

    def _send(self, episode: Episode, segment: Segment) -> None:
        self._buffered.add(episode.owner, -segment.bytes)
        if self._is_beyond(segment):
            count_not_learned("too_large", segment.steps)
            return
        try:
            fragment = segment.to_fragment(
                self._specification.schema,
                self._specification.run,
                self._section.policy,
                compress=self._compress,
                reward=self._reward,
            )
        except PotentialError as error:
            log.error("steps are not learned from", extra={"why": str(error)})  # noqa: TRY400 - the text says all
            count_not_learned("reward", segment.steps)
            return
        metrics.FRAGMENTS_BUILT.inc()
        if self._queue.put(fragment):
            metrics.ENV_STEPS.inc(sum(segment.valid))
            self._on_queued()
        else:
            count_not_learned("full", segment.steps)

    def _is_beyond(self, segment: Segment) -> bool:
        """Return whether the broker would refuse it, and the session with it."""
        bounds = self._specification.bounds()
        given = {"reward": segment.rewards, "log_prob": segment.log_probs}
        # What leaves the range of float32 is sent as its largest number.
        return any(min(max(map(abs, numbers)), MOST) > bounds[name] for name, numbers in given.items())


# ---- The link to a live run: its sessions, the learner's newest weights, and the outbox. A thread opens a
# session, and the next when the broker has ended one; meanwhile the server answers on. When the run has
# ended the thread polls until the run is resumed.

ENDED_S: Final = 10.0
"""Seconds between two looks at a run that has ended, since it may be resumed."""

FLUSH_LOOK_S: Final = 0.1
"""Seconds between two looks at the fragments of a flush, since acknowledgements end no wait."""

Apply = Callable[[Weights], Coroutine[Any, Any, tuple[float, ...]]]
"""Has the server answer with these weights from now on; returns the probe's log-probabilities under them."""


class RunFollower:
    """The sessions of a policy server with a live run; call `begin` once, then `start`, at the end `join`."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        broker_client: BrokerClient,
        actor_id: str,
        *,
        run: str,
        ack_journal: Path | None,
    ) -> None:
        """run: "" where only the broker knows it. ack_journal: folder for what was acknowledged."""
        self._lifecycle, self._broker_client, self._actor_id = lifecycle, broker_client, actor_id
        self._journal_folder = ack_journal
        self._journal: AckJournal | None = None
        self._thread: threading.Thread | None = None
        self._session: Session | None = None
        self._applied = Publication()
        self._run, self._strikes = run, 0
        self._finishing = threading.Event()
        self.queue = ServedQueue(0, 0)
        """Replaced where something is learned."""
        self._failure: Exception | None = None
        self._cut: Callable[[], object] = lambda: None
        self._flushing, self._flush_through = 0, 0

    def begin(self) -> RunSpecification | None:
        """Open the first session, waiting for the run; None when the process drains first."""
        self._session = open_session(self._broker_client, self._actor_id, Role.SERVER, self._lifecycle)
        if self._session is None:
            return None
        self._run = self._session.specification.run
        return self._session.specification

    def fetch(self, version: int) -> Weights | None:
        """Return the weights of a version that the run still holds. Blocks."""
        session = self._session
        if session is None or session.is_over:
            return None
        found = session.fetch(version)
        return None if found is None else Weights(version, found.publication.update, found.blob)

    def send_queued(self) -> None:
        """Have what was put into the queue sent by the open session, if there is one."""
        session = self._session
        if session is not None:
            session.notify_waiters()

    def start(
        self,
        loop: asyncio.AbstractEventLoop,
        apply: Apply,
        on_over: Callable[[], object],
        cut: Callable[[], object],
    ) -> None:
        """Serve sessions, in a thread, until the end; then `on_over`. cut: called in the loop."""
        self._cut = cut
        self._thread = threading.Thread(
            target=self._serve_all, args=(loop, apply, on_over), name="following", daemon=True
        )
        self._thread.start()

    def open_sample_journal(self, run: str, server: str) -> SampleJournal | None:
        """Return the record of what a server samples, if one is kept. server: drawn in each life of it."""
        if self._journal_folder is None:
            return None
        return SampleJournal(self._journal_folder, run, self._actor_id, server)

    def finish(self) -> None:
        """Send what is in the queue, to which nothing will come, then close the session."""
        self._finishing.set()
        self.send_queued()

    def join(self) -> None:
        """Wait until the last session is closed; raises what ended it."""
        if self._thread is not None:
            self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _serve_all(
        self, loop: asyncio.AbstractEventLoop, apply: Apply, on_over: Callable[[], object]
    ) -> None:
        try:
            if self._journal_folder is not None:
                self._journal = AckJournal(self._journal_folder, self._run, self._actor_id)
            while not self._finishing.is_set() and not self._lifecycle.draining.is_set():
                session = self._session or open_session(
                    self._broker_client, self._actor_id, Role.SERVER, self._lifecycle
                )
                if session is None or self._serve(session, loop, apply):
                    self._finishing.wait(ENDED_S)
                self._session = None
        except Exception as error:  # noqa: BLE001 - raised by the main thread
            self._failure = error
        finally:
            self.queue.drop_waiting()
            if self._journal is not None:
                self._journal.close()
            on_over()

    def _serve(self, session: Session, loop: asyncio.AbstractEventLoop, apply: Apply) -> bool:
        """One session; True when the run has ended, or is to be left."""
        if session.specification.run != self._run:
            raise Fatal(f"the broker serves run {session.specification.run}, not {self._run}: start again")
        self._session = session
        session.start()
        outbox = Outbox(session, NumberedWhenSent(self.queue), self._journal)
        outbox.start()
        try:
            self._follow(session, loop, apply)
            session.check()
            strikes = outbox.conclude(self._strikes, SERVER_FLUSH_S)
            if strikes is None and session.ended is None:
                self.queue.drop_waiting()
            self._strikes = self._strikes if strikes is None else strikes
            return strikes is None
        finally:
            session.close(politely=not session.is_over)

    def _follow(self, session: Session, loop: asyncio.AbstractEventLoop, apply: Apply) -> None:
        """Hand on every publication until the session is over or `finish`."""
        while True:
            session.wait_until(
                lambda: self._is_over(session) or self._is_new(session) or session.flush > self._flushing,
                FLUSH_LOOK_S if session.flush else None,
            )
            if self._is_over(session):
                return
            if session.flush:
                self._flush(session, loop)
            if not self._is_new(session):
                continue
            weights = session.weights
            assert weights is not None
            publication = weights.publication
            fresh = Weights(publication.version, publication.update, weights.blob, weights.scalars)
            probe = asyncio.run_coroutine_threadsafe(apply(fresh), loop).result()
            self._applied = publication
            metrics.WEIGHT_VERSION_APPLIED.set(publication.version)
            session.report_applied(publication, probe)

    def _flush(self, session: Session, loop: asyncio.AbstractEventLoop) -> None:
        """Cut once for each flush; report it when all fragments queued at that time have left the queue."""
        if session.flush > self._flushing:
            flush = session.flush
            asyncio.run_coroutine_threadsafe(_called(self._cut), loop).result()
            self._flush_through = self.queue.put_count
            self._flushing = flush
            self.send_queued()
        if self.queue.gone_count >= self._flush_through:
            session.report_flushed(self._flushing)

    def _is_new(self, session: Session) -> bool:
        weights = session.weights
        return weights is not None and weights.publication.version > self._applied.version

    def _is_over(self, session: Session) -> bool:
        return self._finishing.is_set() or session.is_over or session.state is RunState.STOPPING


async def _called(body: Callable[[], object]) -> None:
    body()
