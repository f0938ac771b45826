"""Canaries that equal the active version, judged by two servers that share a registry and are restarted.

Clients differ from one another by one and two deviations of an episode, play one episode after the other on
whichever server, and each server looks after every episode. Of so many trials at most the stated share may
end with a verdict, but for what chance adds once in a hundred. So many trials want a registry that is quick:
`Shared` is one, and a test holds it to the real one.
"""

import heapq
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from penstock.actor.serving.episodes import Episode, SegmentBuilder
from penstock.actor.serving.release import CanaryMonitor
from penstock.config.settings import CanarySection
from penstock.registry import routing, traffic
from penstock.registry.canary import ClientReturn, Seen, Trial, TrialState, Verdict, observe
from penstock.registry.models import Base, VersionRow, now, traffic_row
from penstock.registry.records import Origin, Status, Traffic
from penstock.registry.routing import Arm, Arms
from penstock.registry.traffic import judge

POLICY = "default"
FALSE_ALARM = 0.05
SECTION = CanarySection(false_alarm=FALSE_ALARM, settle_s=1.0)
EPISODE_S = 1.0
"""Mean length of an episode, so that a client has about one, 8 and 64 of them when it is compared."""
END_S = 70.0
NOTHING = SegmentBuilder(0, 0, 1, 1.0)
"""Of every episode: nothing is learned from one."""


def registry(share: float, experiment: str) -> Session:
    """Tables in memory, with an active version and a canary of this share of the experiment's clients."""
    engine = create_engine("sqlite://")
    Base.metadata.create_all(engine)
    session = Session(engine)
    for version, status in ((1, Status.ACTIVE), (2, Status.CANARY)):
        session.add(
            VersionRow(
                policy=POLICY, version=version, run="r", update=version, sha256="0" * 64, size_bytes=1,
                configuration="", origin=Origin.PERIODIC, status=status, standby=False, reason="",
                created=now(), changed=now(),
            )
        )  # fmt: skip
    traffic = traffic_row(session, POLICY)
    traffic.canary_share, traffic.experiment = share, experiment
    session.flush()
    return session


@dataclass
class Shared:
    """What servers share of a trial: each client counts once at each level."""

    arms: Arms
    state: TrialState = field(default_factory=TrialState)
    known: set[tuple[str, int]] = field(default_factory=set)

    def judge(self, _trial: Trial, bounds: CanarySection, found: list[Seen]) -> TrialState:
        """As `Registry.judge`."""
        for one in found:
            assert isinstance(one, ClientReturn)
            if (one.client, one.level) not in self.known:
                self.known.add((one.client, one.level))
                self.state = observe(self.state, bounds, one)
        return self.state


@dataclass
class Tables:
    """The real thing."""

    session: Session

    @property
    def arms(self) -> Arms:
        """Of the trial."""
        return traffic.arms(self.session, POLICY)

    def judge(self, trial: Trial, bounds: CanarySection, found: list[Seen]) -> TrialState:
        """As `Registry.judge`."""
        state = judge(self.session, POLICY, trial, bounds, found)
        assert state is not None
        return state


@dataclass
class Fleet:
    """Two servers, clients, and the time."""

    clients: int
    between: float
    seed: int
    shared: Shared | Tables
    now_s: float = 0.0
    state: TrialState = field(default_factory=TrialState)

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.arms = self.shared.arms
        self.means = [self.draw.gauss(0.0, self.between) for _ in range(self.clients)]
        self.keys = [f"client-{client}" for client in range(self.clients)]
        self.followed = [routing.route(self.arms, key).arm for key in self.keys]
        self.servers = [self.new_server(), self.new_server()]

    def new_server(self) -> CanaryMonitor:
        """One that knows nothing yet."""
        monitor = CanaryMonitor(SECTION, lambda _version, _why: None, lambda: self.now_s)
        monitor.steer(self.arms)
        return monitor

    def look(self, server: CanaryMonitor) -> None:
        """As a server does with each look at the registry."""
        assert server.trial is not None
        found = server.take()
        if found:
            self.state = self.shared.judge(server.trial, server.bounds, found)

    def events(self) -> Iterator[tuple[int, CanaryMonitor, Episode]]:
        """Beginnings and ends of episodes, as they come."""
        due = [(self.draw.random() * EPISODE_S, client) for client in range(self.clients)]
        heapq.heapify(due)
        playing: dict[int, tuple[CanaryMonitor, Episode]] = {}
        while due and due[0][0] < END_S:
            self.now_s, client = heapq.heappop(due)
            if client in playing:
                yield client, *playing.pop(client)
            server = self.servers[self.draw.random() < 0.5]
            episode = self.episode(client)
            server.begin(episode)
            playing[client] = server, episode
            heapq.heappush(due, (self.now_s + self.draw.expovariate(1 / EPISODE_S), client))

    def episode(self, client: int) -> Episode:
        """One that begins, on the arm that the client's key is dealt."""
        return Episode(
            id="", number=0, lane=0, client_key=self.keys[client], arm=self.followed[client], owner=None,
            segment_builder=NOTHING, learned=False, last_call_s=self.now_s,
        )  # fmt: skip

    def verdict(self) -> Verdict:
        """The first one of a false kind, else the last; a server is restarted now and then."""
        for client, server, episode in self.events():
            episode.add_reward(0, self.means[client] + self.draw.gauss(0.0, 1.0))
            episode.is_over = True
            server.end(episode, is_whole=True)
            self.look(server)
            if self.state.verdict in (Verdict.WITHDRAW, Verdict.BETTER):
                break
            if self.draw.random() < 1 / (20 * self.clients):
                self.servers[self.draw.randrange(2)] = self.new_server()
        return self.state.verdict


def shared(seed: int) -> Shared:
    """A trial of a tenth or a half of the clients, dealt anew by its experiment's name."""
    traffic = Traffic(policy=POLICY, canary_share=(0.1, 0.5)[seed % 2], experiment=f"trial-{seed}")
    return Shared(Arms(traffic=traffic, active=1, canary=2, pinned=frozenset({1, 2})))


def test_the_registry_judges_as_the_simulation_does() -> None:
    fleet = Fleet(30, 1.0, 3, shared(3))
    with registry(0.5, "trial-3") as session:
        real = Fleet(30, 1.0, 3, Tables(session))
        assert real.verdict() is fleet.verdict()
    assert real.state == fleet.state
    assert {fleet.episode(client).arm for client in range(30)} == {Arm.CANARY, Arm.ACTIVE}
    counts = [level.canary + level.active for level in fleet.state.levels]
    assert counts[0] == 30
    assert 20 <= counts[1] <= 30


@pytest.mark.promise("canary-equals-active-version")
@pytest.mark.parametrize("between", [1.0, 2.0])
@pytest.mark.parametrize(
    ("clients", "trials"),
    [
        (20, 30),
        pytest.param(20, 2500, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
        pytest.param(50, 2000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
        pytest.param(200, 400, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
        pytest.param(1000, 100, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
)
def test_a_canary_that_is_as_good_is_hardly_ever_judged_worse(
    clients: int, trials: int, between: float
) -> None:
    verdicts = [Fleet(clients, between, seed, shared(seed)).verdict() for seed in range(trials)]
    false = sum(verdict in (Verdict.WITHDRAW, Verdict.BETTER) for verdict in verdicts)
    most = FALSE_ALARM + 2.33 * (FALSE_ALARM * (1 - FALSE_ALARM) / trials) ** 0.5
    print(f"{false} of {trials} with {clients} clients, {between} between them; at most {most:.3f}")
    assert false / trials <= most
