import heapq
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from penstock.actor.serving.batcher import Answer, Answered, Pass
from penstock.actor.serving.episodes import Episode, Opinion, SegmentBuilder
from penstock.actor.serving.release import (
    MAX_WINDOWS,
    WINDOW_ANSWERS,
    WINDOW_S,
    AnswerWindows,
    CanaryMonitor,
    ClientReturns,
    is_same_network,
)
from penstock.actor.serving.release import Traffic as ReleaseTraffic
from penstock.config.settings import CanarySection
from penstock.policy.policy import Policy
from penstock.protocol.refusal import Reason, Refused
from penstock.protocol.specification import RunSpecification
from penstock.registry import canary as canary_trial
from penstock.registry import routing, traffic
from penstock.registry.canary import Cause, ClientReturn, Seen, Trial, TrialState, Verdict, Window, observe
from penstock.registry.models import Base, VersionRow, now, traffic_row
from penstock.registry.records import Origin, Status, Traffic
from penstock.registry.registry import Registry
from penstock.registry.routing import Arm, Arms
from penstock.registry.traffic import judge
from penstock.registry.weight_files import registry_url
from penstock.runtime import metrics
from penstock.v1 import policy_pb2 as pb
from tests.support.run.serving_run import POLICY as SERVING_RUN_POLICY
from tests.support.run.serving_run import ServedRun
from tests.support.run.small_run import specification as small_run_specification
from tests.support.serving.server_parts import Stand, broken, loaded_of, policy_of, seen, specification

SLOW_S = 0.05
LOADED = loaded_of(specification())


def answered(rows: int = 1, seconds: float = 0.001) -> Answered:
    answer = Answer(LOADED, {}, {}, None, passed=Pass(rows, seconds))  # type: ignore[arg-type]  # not read
    return Answered(arm=Arm.CANARY, action={}, answer=answer, fallback="")


def failed(*, is_to_blame: bool = True) -> Answered:
    return Answered(arm=Arm.CANARY, action={}, answer=None, fallback="uniform", is_to_blame=is_to_blame)


def tell(windows: AnswerWindows, canary: list[Answered], active: list[Answered]) -> None:
    for one in active:
        windows.answered(one, canary=False, now_s=0.0)
    for one in canary:
        windows.answered(one, canary=True, now_s=0.0)


def slower(canary: list[Answered], active: list[Answered]) -> float | None:
    windows = AnswerWindows(SLOW_S, 0.0)
    tell(windows, canary, active)
    (window,) = windows.take(WINDOW_S)
    return window.slower


def test_a_window_counts_unanswered_requests_of_the_canary() -> None:
    windows = AnswerWindows(SLOW_S, 0.0)
    tell(windows, [answered(), failed(), failed(is_to_blame=False)], [answered()] * 10)
    assert windows.take(WINDOW_S - 0.1) == []
    (window,) = windows.take(WINDOW_S)
    assert (window.answers, window.failed, window.not_finite) == (3, 1, 0)
    assert windows.take(2 * WINDOW_S) == []


@pytest.mark.parametrize(
    ("canary", "active", "expected"),
    [
        ([answered(1, 5.0)] * 4, [answered(1)] * 9, 1.0),
        ([answered(1, 5.0), answered(1)], [answered(1)] * 9, 0.5),
        ([answered(1, 5.0)] * 4, [answered(1, 5.0)] * 9, 0.0),
        # Its clients ask for much, and much takes long on either arm.
        ([answered(512, 5.0)] * 4, [answered(1)] * 9 + [answered(512, 5.0)], 0.0),
        ([answered(512, 5.0)] * 4, [answered(1)] * 9, None),
        # A larger pass that is quick says that a smaller one should be.
        ([answered(4, 5.0)] * 4, [answered(64)] * 9, 1.0),
        ([failed()] * 4, [answered(1)] * 9, None),
    ],
)
def test_slow_passes_are_compared_with_those_of_their_size_or_larger(
    canary: list[Answered], active: list[Answered], expected: float | None
) -> None:
    assert slower(canary, active) == expected


def test_untaken_windows_are_limited() -> None:
    windows = AnswerWindows(SLOW_S, 0.0)
    for _ in range((MAX_WINDOWS + 3) * WINDOW_ANSWERS):
        windows.answered(answered(), canary=True, now_s=0.0)
    closed = windows.take(0.0)
    assert [window.answers for window in closed] == [WINDOW_ANSWERS] * MAX_WINDOWS
    windows.answered(answered(), canary=True, now_s=0.0)
    assert [window.answers for window in windows.take(WINDOW_S)] == [1]


ACTIVE, CANARY = 1, 2
SETTLE_S = 10.0


async def on_trial(policy: Policy | None = None, **canary: Any) -> Stand:
    given: dict[str, Any] = {"slow_ms": 1e6, "horizon": 60, "settle_s": SETTLE_S}
    serving = {key: canary.pop(key) for key in ("fallback",) if key in canary}
    stand = Stand(canary=given | canary, **serving)
    stand.keep(ACTIVE)
    stand.keep(CANARY, policy=policy)
    await steer(stand, CANARY)
    return stand


async def steer(stand: Stand, canary: int | None, **traffic: Any) -> None:
    shares = {"canary_share": 0.0 if canary is None else 0.5} | traffic
    held = frozenset({ACTIVE, CANARY, *stand.weights})
    arms = Arms(traffic=Traffic(policy="default", **shares), active=ACTIVE, canary=canary, pinned=held)
    await stand.loaded_versions.steer(arms)
    stand.canary_monitor.steer(arms)


def look(stand: Stand, passed_s: float = 0.0) -> list[Seen]:
    """Hand on what was seen, after so many seconds, and take the judgement, as one server alone does."""
    stand.now_s += passed_s
    monitor, found = stand.canary_monitor, stand.canary_monitor.take()
    if monitor.trial is not None:
        monitor.judged(monitor.trial, canary_trial.observe_all(monitor.state, monitor.bounds, found))
    return found


async def play(stand: Stand, client: int, good: float = 1.0, bad: float = 1.0) -> None:
    """An episode of one step; its return depends on the arm."""
    episode = stand.start(f"client-{client}")
    reply = await stand.act(episode, seen(0))
    reward = bad if reply.arm == pb.ARM_CANARY else good
    stand.end(episode, pb.ENDING_TERMINATED, reward=reward)


async def ask(stand: Stand, client: int) -> None:
    request = stand.asking(seen(0), client_key=f"client-{client}")
    stand.canary_monitor.answered((await stand.answer(request, 1e9))[1])


def value_of(name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", metrics.exposition("server").decode(), re.MULTILINE)
    assert found is not None, name
    return float(found[1])


async def test_a_canary_whose_clients_earn_less_is_withdrawn() -> None:
    stand, before = await on_trial(), value_of("penstock_canaries_withdrawn_total")
    for client in range(100):
        await play(stand, client, good=1.0, bad=0.0)
    look(stand, SETTLE_S)
    ((version, why),) = stand.withdrawn
    assert value_of("penstock_canaries_withdrawn_total") == before + 1
    assert version == CANARY
    assert why.startswith("withdraw for lower_return")
    assert stand.canary_monitor.state.levels[0].canary < 60


async def test_an_equal_canary_is_undecided_at_the_horizon_and_the_trial_continues() -> None:
    stand = await on_trial()
    for client in range(200):
        await play(stand, client)
    look(stand, SETTLE_S)
    assert stand.withdrawn == []
    assert stand.canary_monitor.state.verdict is Verdict.UNDECIDED
    assert value_of("penstock_canary_undecided") == 1
    for client in range(200, 300):
        await play(stand, client, bad=0.0)
    look(stand, SETTLE_S)
    assert [version for version, _ in stand.withdrawn] == [CANARY]


@pytest.mark.promise("episode-never-ends-delays")
@pytest.mark.parametrize("held", [0, 5])
async def test_an_episode_that_never_ends_delays_no_client(held: int) -> None:
    stand = await on_trial()
    for client in range(1000, 1000 + 4 * held):
        await stand.act(stand.start(f"client-{client}"), seen(0))
    for client in range(60):
        await play(stand, client, bad=0.0)
    found = look(stand, SETTLE_S)
    assert len([one for one in found if isinstance(one, ClientReturn)]) == 60
    assert [version for version, _ in stand.withdrawn] == [CANARY]


async def test_a_client_is_compared_at_fixed_times_by_its_mean() -> None:
    stand = await on_trial()
    for earned in (1.0, 3.0):
        await play(stand, 7, good=earned, bad=earned)
    open_ = stand.start("client-8")
    await stand.act(open_, seen(0))
    await stand.reward(open_, (0, 0.25))
    values = {}
    for level, age in enumerate((SETTLE_S, 8 * SETTLE_S, 64 * SETTLE_S)):
        early, due = look(stand, age - 0.1 - stand.now_s), look(stand, 0.1)
        assert all(isinstance(one, Window) for one in early)
        values[level] = [one.value for one in due if isinstance(one, ClientReturn)]
        await play(stand, 7, good=2.0, bad=2.0)
    assert values == {0: [2.0, 0.25], 1: [2.0, 0.25], 2: [2.0, 0.25]}


async def test_an_abandoned_episode_is_no_return() -> None:
    stand = await on_trial()
    for client in range(100):
        episode = stand.start(f"client-{client}")
        reply = await stand.act(episode, seen(0))
        earned = 0.0 if reply.arm == pb.ARM_CANARY else 1.0
        await stand.reward(episode, (0, earned))
        stand.end(episode, pb.ENDING_ABANDONED)
    assert all(isinstance(one, Window) for one in look(stand, SETTLE_S))
    assert stand.withdrawn == []


async def test_episodes_of_another_trial_or_other_shares_do_not_count() -> None:
    stand = await on_trial()
    for change in ({"canary": 3}, {"canary": 3, "canary_share": 0.6}, {"canary": 3, "experiment": "second"}):
        open_ = [stand.start(f"client-{client}") for client in range(40)]
        for episode in open_:
            await stand.act(episode, seen(0))
        stand.keep(3)
        await steer(stand, **change)
        for episode in open_:
            stand.end(episode, pb.ENDING_TERMINATED, reward=0.5)
        assert all(isinstance(one, Window) for one in look(stand, SETTLE_S))


async def test_observations_that_the_registry_did_not_get_are_sent_again() -> None:
    stand = await on_trial()
    for client in range(20):
        await play(stand, client)
    stand.now_s += SETTLE_S
    found = stand.canary_monitor.take()
    assert found
    stand.canary_monitor.give_back(found)
    assert value_of('penstock_canary_unguarded{reason="registry"}') == 1
    assert look(stand) == found
    assert value_of('penstock_canary_unguarded{reason="registry"}') == 0


async def test_a_canary_still_active_is_withdrawn_again() -> None:
    stand, before = await on_trial(), value_of("penstock_canaries_withdrawn_total")
    for client in range(60):
        await play(stand, client, bad=0.0)
    for times in (1, 2):
        look(stand, SETTLE_S)
        look(stand)
        assert [version for version, _ in stand.withdrawn] == [CANARY] * times
        await steer(stand, CANARY)
    assert value_of("penstock_canaries_withdrawn_total") == before + 1
    await steer(stand, None)
    look(stand)
    assert len(stand.withdrawn) == 2


async def test_a_metric_shows_a_canary_without_clients_to_compare_with() -> None:
    def unguarded(reason: str) -> bool:
        return value_of(f'penstock_canary_unguarded{{reason="{reason}"}}') == 1

    stand = await on_trial()
    assert unguarded("returns")
    await steer(stand, CANARY, canary_share=0.0)
    assert unguarded("no_comparison")
    await steer(stand, CANARY)
    for client in range(40):
        await play(stand, client)
    look(stand, SETTLE_S)
    assert not unguarded("returns")
    assert not unguarded("no_comparison")
    await steer(stand, None)
    assert not unguarded("returns")


@pytest.mark.parametrize("fallback", ["previous", "uniform", "none"])
@pytest.mark.parametrize("in_episodes", [True, False])
async def test_a_canary_that_answers_nan_is_withdrawn_at_once(fallback: str, in_episodes: bool) -> None:
    policy = broken(policy_of(Stand().specification, CANARY))
    stand = await on_trial(policy=policy, fallback=fallback)
    for client in range(20):
        try:
            await (play if in_episodes else ask)(stand, client)
        except Refused:
            assert fallback == "none"
    assert [version for version, _ in stand.withdrawn] == [CANARY]
    look(stand)
    assert stand.canary_monitor.state.cause is Cause.NOT_FINITE


@pytest.mark.promise("judgement-canary-never-ends")
async def test_guards_work_for_ten_thousand_answers() -> None:
    stand = await on_trial()
    for client in range(64):
        await play(stand, client)
    good = Window(answers=256, slower=0.0)
    state = canary_trial.observe_all(stand.canary_monitor.state, stand.canary_monitor.bounds, [good] * 1000)
    assert stand.canary_monitor.trial is not None
    stand.canary_monitor.judged(stand.canary_monitor.trial, state)
    stand.keep(3, policy=broken(policy_of(stand.specification, CANARY)))
    stand.loaded_versions._held[CANARY] = await stand.loaded_versions.load(stand.weights[3])
    for client in range(10):
        await ask(stand, client)
    assert [version for version, _ in stand.withdrawn] == [CANARY]


async def test_a_request_that_no_version_can_answer_does_not_count_against_the_canary() -> None:
    made = Stand().specification
    stand = await on_trial(policy=broken(policy_of(made, CANARY)))
    stand.keep(ACTIVE, policy=broken(policy_of(made, ACTIVE)))
    stand.loaded_versions._held[ACTIVE] = await stand.loaded_versions.load(stand.weights[ACTIVE])
    for client in range(40):
        await ask(stand, client)
    look(stand, 10.0)
    assert stand.withdrawn == []
    state: TrialState = stand.canary_monitor.state
    assert (state.answers > 10, state.failed) == (True, 0)


async def test_a_canary_without_weights_is_withdrawn_by_its_failed_answers() -> None:
    stand = await on_trial()
    del stand.weights[CANARY], stand.loaded_versions._held[CANARY]
    stand.loaded_versions.note_answered(Arm.CANARY, stand.loaded_versions._held[ACTIVE])
    for _ in range(6):
        for client in range(40):
            await ask(stand, client)
        look(stand, 10.0)
    assert [version for version, _ in stand.withdrawn][:1] == [CANARY]
    assert stand.canary_monitor.state.cause is Cause.ERRORS


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
    session: Session

    @property
    def arms(self) -> Arms:
        return traffic.arms(self.session, POLICY)

    def judge(self, trial: Trial, bounds: CanarySection, found: list[Seen]) -> TrialState:
        """As `Registry.judge`."""
        state = judge(self.session, POLICY, trial, bounds, found)
        assert state is not None
        return state


@dataclass
class Fleet:
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
        monitor = CanaryMonitor(SECTION, lambda _version, _why: None, lambda: self.now_s)
        monitor.steer(self.arms)
        return monitor

    def look(self, server: CanaryMonitor) -> None:
        assert server.trial is not None
        found = server.take()
        if found:
            self.state = self.shared.judge(server.trial, server.bounds, found)

    def events(self) -> Iterator[tuple[int, CanaryMonitor, Episode]]:
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


def test_the_registry_judges_like_the_simulation() -> None:
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
def test_an_equal_canary_is_rarely_judged_worse(clients: int, trials: int, between: float) -> None:
    verdicts = [Fleet(clients, between, seed, shared(seed)).verdict() for seed in range(trials)]
    false = sum(verdict in (Verdict.WITHDRAW, Verdict.BETTER) for verdict in verdicts)
    most = FALSE_ALARM + 2.33 * (FALSE_ALARM * (1 - FALSE_ALARM) / trials) ** 0.5
    print(f"{false} of {trials} with {clients} clients, {between} between them; at most {most:.3f}")
    assert false / trials <= most


def conversation(client: str, *, turns: int = 1) -> Episode:
    return Episode(
        id=client,
        number=1,
        lane=0,
        client_key=client,
        arm=Arm.CANARY,
        owner=None,
        segment_builder=SegmentBuilder(0, 1, 4, 60.0),
        learned=False,
        last_call_s=0.0,
        opinion=Opinion(turns=turns),
    )


def settled(*talks: Episode, over: bool = True, is_whole: bool = True) -> list[ClientReturn]:
    """What is compared after these conversations, one after the other."""
    returns = ClientReturns(SETTLE_S, (-0.25, 0.25))
    for one in talks:
        watched = returns.begin(one, canary=True, part=0.5, now_s=0.0)
        assert watched is not None
        if over:
            one.is_over = True
            watched.end(one, is_whole=is_whole)
    return returns.settled(SETTLE_S)


def thumbs(client: str, *given: float, asked: Sequence[float] = ()) -> Episode:
    """A conversation with a turn for each thumb, and for each that somebody was asked for."""
    talk = conversation(client, turns=max(1, len(given) + len(asked)))
    assert talk.opinion is not None
    talk.opinion.hear(list(enumerate(given)), asked=False)
    talk.opinion.hear(list(enumerate(asked, len(given))), asked=True)
    return talk


@pytest.mark.parametrize("over", [True, False])
@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize(
    ("given", "value", "rated"),
    [
        ((1.0,), 1.0, 1.0),
        ((-1.0,), 0.0, 1.0),
        ((), 0.0, 0.0),
        ((1.0, -1.0), 0.0, 1.0),
        ((-1.0, 2.0), 1.0, 1.0),
    ],
)
def test_a_conversations_outcome_is_liked_or_not(
    given: Sequence[float], value: float, rated: float, *, over: bool, is_whole: bool
) -> None:
    (found,) = settled(thumbs("ann", *given), over=over, is_whole=is_whole)
    assert (found.value, found.rated) == (value, rated)


def test_the_value_of_a_person_is_the_share_of_liked_conversations() -> None:
    (found,) = settled(thumbs("ann", 1.0), thumbs("ann"), thumbs("ann", -1.0), thumbs("ann", 1.0))
    assert (found.value, found.rated) == (0.5, 0.75)


@pytest.mark.promise("turn-somebody-asked-about")
def test_a_conversation_whose_rating_was_requested_counts_for_no_arm() -> None:
    assert settled(thumbs("ann", asked=[1.0])) == []
    (found,) = settled(thumbs("bob", -1.0, asked=[1.0]))
    assert (found.value, found.rated) == (0.0, 1.0)
    (found,) = settled(thumbs("cid", asked=[1.0]), thumbs("cid", 1.0))
    assert (found.value, found.rated) == (1.0, 1.0)


@pytest.mark.parametrize("over", [True, False])
def test_a_conversation_without_an_answer_counts_for_no_arm(*, over: bool) -> None:
    assert settled(conversation("ann", turns=0), over=over, is_whole=False) == []
    (found,) = settled(conversation("bob", turns=0), thumbs("bob", 1.0))
    assert (found.value, found.rated) == (1.0, 1.0)


def test_a_return_is_no_opinion_of_a_person() -> None:
    program = replace(conversation("agent"), opinion=None)
    assert settled(replace(program)) == []
    program.add_reward(0, 3.0)
    assert settled(replace(program), is_whole=False) == []
    (found,) = settled(program)
    assert (found.value, found.rated) == (0.25, None)


def made_of(model: object, **kwargs: Any) -> RunSpecification:
    return replace(
        small_run_specification(),
        policy_json=json.dumps({"kwargs": {"model": str(model), "rank": 4, **kwargs}}),
    )


def base(folder: Path, weights: bytes = b"weights", **files: str) -> Path:
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "tokenizer" / "words.json").write_text("{}")
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def test_the_same_files_are_the_same_base_model(tmp_path: Path) -> None:
    one, other = base(tmp_path / "one"), base(tmp_path / "other")
    assert is_same_network(made_of(one), made_of(other))
    assert is_same_network(made_of("hub/name"), made_of("hub/name"))


@pytest.mark.parametrize("said", [{"weights": b"wrights"}, {"more": "a"}])
def test_other_files_are_another_base_model(tmp_path: Path, said: dict[str, Any]) -> None:
    one, other = base(tmp_path / "one"), base(tmp_path / "other", **said)
    assert not is_same_network(made_of(one), made_of(other))
    assert not is_same_network(made_of(one), made_of(tmp_path / "gone"))
    assert not is_same_network(made_of(one), made_of("hub/name"))


def test_other_settings_are_another_network(tmp_path: Path) -> None:
    one = base(tmp_path / "one")
    assert not is_same_network(made_of(one), made_of(one, rank=8))
    assert not is_same_network(made_of(one), made_of(one, lora=False))
    assert not is_same_network(made_of(one), replace(made_of(one), workload="rlhf"))


async def test_a_late_reward_needs_no_kept_version(tmp_path: Path) -> None:
    url = registry_url(tmp_path)
    traffic = ReleaseTraffic(url, SERVING_RUN_POLICY, tmp_path, None, ServedRun(tmp_path).specification())
    assert traffic.look() is None
    await traffic.keep_feedback("ada", [("episode", 3, 0.5)])
    found = traffic.look()
    assert found is not None
    assert found[1] is None
    with Registry.open(url) as registry:
        kept = [(one.episode, one.step, one.amount) for one in registry.feedback(SERVING_RUN_POLICY)]
    assert kept == [("episode", 3, 0.5)]


async def test_a_late_reward_is_refused_where_no_registry_can_be(tmp_path: Path) -> None:
    folder = tmp_path / "absent"
    traffic = ReleaseTraffic(
        registry_url(folder), SERVING_RUN_POLICY, folder, None, ServedRun(tmp_path).specification()
    )
    with pytest.raises(Refused) as refused:
        await traffic.keep_feedback("ada", [("episode", 3, 0.5)])
    assert refused.value.refusal.reason is Reason.NOT_READY
