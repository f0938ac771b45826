"""From what clients did to what the learner gets: segments ripen, become fragments and go to the outbox.

Production never waits for training. What cannot be learned from is answered all the same and counted by
reason:

    arm         the client follows a version that is not the learner's newest
    unasked     the client does not want it
    full        the outbox, or the memory for open episodes, is full
    too_large   a reward or log-probability lies beyond what the run's broker takes
    stale       it waited until the learner had gone too far
    abandoned   the client never said what came of it
    lost        the session ended while it was under way
    reward      the potential that shapes its rewards gives no finite numbers
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Final

import numpy as np

from penstock.actor.acting.masks import LearnerReward, PotentialError
from penstock.actor.link.outbox import FragmentQueue, Queued, fill_message
from penstock.actor.serving.batcher import Loaded, Question
from penstock.actor.serving.episodes import CallerShares, Episode, Row, Segment
from penstock.config.settings import ServingSection
from penstock.protocol.conformance import MOST
from penstock.protocol.fragment import Fragment
from penstock.protocol.limits import MAX_FRAGMENTS_PER_APPEND
from penstock.protocol.messages import Episode as Played
from penstock.protocol.specification import RunSpecification
from penstock.runtime import metrics

# ---- Fragments of the policy server on their way to the broker: never waited for, numbered when they are
# sent.

_MOST_EPISODES: Final = 16_384


class ServedQueue:
    """Fragments that wait for their number, and episodes for their report, over all sessions. Thread-safe."""

    def __init__(self, capacity: int, stale_after: int) -> None:
        """Make an empty queue.

        capacity: most fragments that wait.
        stale_after: updates that the learner may be ahead of one; 0: any.
        """
        self._capacity, self._stale_after = capacity, stale_after
        self._lock = threading.Lock()
        self._waiting: deque[Fragment] = deque()
        self.put_count = 0
        self.gone_count = 0
        """Fragments of those put that were acknowledged or dropped, in the order in which they came."""
        self.episodes: deque[Played] = deque(maxlen=_MOST_EPISODES)

    def __len__(self) -> int:
        return len(self._waiting)

    def note_gone(self, count: int) -> None:
        """Count fragments that were acknowledged or dropped."""
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
        """Put the refused back in front and take the oldest, as many as one message holds.

        What is too old at this update of the learner is dropped and counted.
        """
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
    """What one session sends of a `ServedQueue`; holds itself what is under way, with its numbers."""

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
        """Number the oldest now: what was refused has no number, for nothing of it was stored."""
        if self._is_dropped:
            return []
        taken = self._queue.exchange([queued.fragment for queued in self._queued], update)
        batch = [_numbered(fragment, session, sequence) for sequence, fragment in enumerate(taken, first)]
        now = time.monotonic()
        self._queued = deque(Queued(fragment, now) for fragment in batch)
        return batch

    def acknowledge(self, sequence: int) -> list[Queued]:
        taken = super().acknowledge(sequence)
        self._queue.note_gone(len(taken))
        return taken

    def drop(self) -> list[Fragment]:
        """Drop the fragments under way, counted as lost; what has no number is for the next session."""
        dropped = super().drop()
        self._is_dropped = True
        self._queue.note_gone(len(dropped))
        count_not_learned("lost", sum(fragment.header.steps for fragment in dropped))
        return dropped


def _numbered(fragment: Fragment, session: int, sequence: int) -> Fragment:
    return replace(fragment, header=replace(fragment.header, session=session, sequence=sequence))


def count_not_learned(reason: str, steps: int) -> None:
    """Steps that were answered and do not go to the learner."""
    metrics.NOT_LEARNED_STEPS.labels(reason).inc(steps)


REASONS: Final = ("arm", "unasked", "full", "too_large", "stale", "abandoned", "lost", "reward")

STEP_BYTES: Final = 512
"""What a step takes beside its arrays: tables of names, places in lists."""
ARRAY_BYTES: Final = 160
"""What an array takes beside its numbers. For small observations these two are nearly all of it."""

log = logging.getLogger(__name__)


class Learning:
    """Used by one event loop; `on_queued` is called when a fragment was put into the queue."""

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
        """Note that the episode is over."""
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
        """Cut what open episodes hold; a segment whose rewards may still come ripens as any other."""
        for episode in episodes:
            if episode.learned:
                self._take(episode, episode.segment_builder.cut(), now_s)

    def stop(self, episode: Episode, reason: str, now_s: float) -> None:
        """This step and the rest of the episode are only answered; what was seen before is kept."""
        self.give_up(episode, now_s)
        episode.learned, episode.unlearned_as = False, reason
        episode.segment_builder.skip(now_s)
        count_not_learned(reason, 1)

    def _take(self, episode: Episode, segment: Segment | None, now_s: float) -> None:
        """A segment that was cut. It becomes a fragment when no reward may come any more."""
        if segment is None:
            return
        if self._section.reward_window_s == 0.0:
            self._send(episode, segment)
            return
        episode.ripening.append(segment)
        self._ripening.append((now_s + self._section.reward_window_s, episode, segment))

    def ripen(self, now_s: float) -> None:
        """Send what is due."""
        while self._ripening and self._ripening[0][0] <= now_s:
            self._send_first()

    def send_all(self) -> None:
        """Before the end: what ripens is taken as it is."""
        while self._ripening:
            self._send_first()

    def _report(self, episode: Episode, *, terminated: bool) -> None:
        """An episode is over."""
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

    def _send_first(self) -> None:
        _, episode, segment = self._ripening.popleft()
        episode.ripening.remove(segment)
        self._send(episode, segment)

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
