"""A learner that runs: its threads are started, the loop learns, everything is ended.

Threads: the loop (this one), feed, publisher, lease, episodes, versions. They share no state but what each
part guards itself. The first error of any of them ends all; nothing is written after a refused renewal.
"""

from dataclasses import dataclass
from typing import Final

from penstock.learner.evaluation.reported_episodes import Episodes
from penstock.learner.feed.source import Feed
from penstock.learner.lease import LeaseKeeper
from penstock.learner.process.account import Account
from penstock.learner.process.commands.command_follower import CommandFollower
from penstock.learner.process.loop import Loop
from penstock.learner.process.opening import OpenedRun
from penstock.learner.process.replay_reload import reload
from penstock.learner.process.stall import StallWatch
from penstock.learner.publish.kept_versions import KeptVersions
from penstock.learner.publish.publisher import Publisher
from penstock.learner.publish.weight_offers import WeightOffers
from penstock.learner.ranks.leading import Ranks
from penstock.learner.thread_group import ThreadGroup
from penstock.runtime import metrics
from penstock.runtime.exit import RunFailed
from penstock.runtime.health import Health
from penstock.runtime.retry import Interrupted

_JOIN_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerRun:
    """The parts that have threads of their own, and the loop that needs them. `run` once."""

    opened: OpenedRun
    ranks: Ranks
    health: Health
    threads: ThreadGroup
    lease: LeaseKeeper
    feed: Feed
    publisher: Publisher
    offers: WeightOffers
    episodes: Episodes
    kept: KeptVersions
    commands: CommandFollower
    stall: StallWatch
    loop: Loop
    account: Account

    def run(self) -> None:
        """Learn until the end; leaves a committed checkpoint, the final policy and `learner.json`.

        Raises RunFailed, after all that, when no update was made for `learner.stall_timeout_s`.
        """
        try:
            self._start()
            outcome = self.loop.run()
            self.account.close(outcome)
        except Interrupted:
            # Another thread has failed while this one waited: its error is the cause.
            self.threads.check()
            raise
        finally:
            self.threads.join(_JOIN_S)
        self.threads.check()
        self.opened.learner_log.release()
        self.opened.learner_log.close()
        if outcome.stalled:
            raise RunFailed(outcome.stalled)

    def _start(self) -> None:
        opened, algorithm = self.opened, self.opened.model.algorithm
        self.threads.start("lease", self.lease.run, self.lease.wake)
        reload(
            opened.learner_log,
            self.lease,
            algorithm,
            run_name=opened.settings.run,
            schema=opened.model.specification.schema,
            ranges=opened.model.ranges,
            device=opened.model.device,
            position=opened.beginning.ledger.position,
        )
        self.threads.start("publisher", self.publisher.run, self.publisher.wake)
        self.kept.begin()
        self.offers.publish_first()
        self.ranks.start(algorithm)
        self.commands.begin(went_back=opened.beginning.went_back)
        self.threads.start("feed", self.feed.run)
        self.threads.start("episodes", self.episodes.run)
        self.threads.start("versions", self.kept.run, self.kept.wake)
        self.stall.begin()
        metrics.STALENESS_SETTING.set(algorithm.staleness)
        self.health.set_ready(True)
