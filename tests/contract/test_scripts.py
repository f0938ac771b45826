"""Every script's replies and effects, on each Redis server found."""

import re
import time
from dataclasses import replace
from typing import Any

import pytest
import redis

from penstock.broker.log import keys, learner_log
from penstock.broker.log import script as scripts
from penstock.broker.log.learner_log import LearnerLog
from penstock.broker.log.replies import Commit, Opened, Totals
from penstock.broker.log.store import Store
from penstock.config.settings import ConfigurationError
from penstock.protocol.fragment import Kind
from penstock.protocol.limits import WEIGHT_CHUNK_BYTES
from penstock.protocol.messages import Episode, Report, Role, RunState, Watch
from penstock.protocol.refusal import Reason, Refusal, Refused
from tests.support.run.small_run import CHARGE, RUN, STEPS, specification
from tests.support.run.store_run import BLOB, PACING, TTL_MS, Actor, Begin, item, new_actor, open_run


@pytest.mark.parametrize("name", scripts.names())
def test_every_script_compiles(redis_url: str, name: str) -> None:
    script = scripts.load(name)
    assert script.sha1 == redis.Redis.from_url(redis_url).script_load(script.source)


def test_a_script_has_the_functions_that_it_calls_and_no_names_of_constants() -> None:
    source = scripts.load("confirm").source
    assert source.count("local function") == 3, "reading the start, the envelope, the script itself"
    assert "penstock:state" in source
    assert not re.search(r"\b(STATE|LAYOUT|READS_EARLIER)\b|--", source)


def test_the_state_is_a_table(log: LearnerLog, raw: "redis.Redis") -> None:
    assert raw.object("encoding", keys.STATE) == b"hashtable"


async def test_before_a_run_nothing_is_opened_or_commanded(store: Store) -> None:
    refusal = await store.open_session("actor-0", Role.ROLLOUT)
    assert isinstance(refusal, Refusal)
    assert (refusal.reason, refusal.retry_after_ms > 0) == (Reason.NOT_READY, True)
    for ask in (store.control("pause"), store.command("checkpoint", "", "id-1")):
        with pytest.raises(Refused, match="not_ready"):
            await ask
    status = await store.status()
    assert (status.run, status.closed, status.sessions) == ("", True, ())


async def test_a_second_session_has_its_own_salt_and_fences_the_first(store: Store, log: LearnerLog) -> None:
    first = await new_actor(store)
    again = await store.open_session("actor-0", Role.ROLLOUT)
    assert isinstance(again, Opened)
    assert again.session == again.seed_salt == 2
    refused = (await first.append()).refusal
    assert refused is not None
    assert refused.reason is Reason.FENCED


async def test_no_other_identity_takes_over_the_name_of_an_owned_session(
    store: Store, log: LearnerLog
) -> None:
    first = await store.open_session("actor-0", Role.ROLLOUT, "actor gpu-1")
    assert isinstance(first, Opened)
    for other in ("actor gpu-2", ""):
        refused = await store.open_session("actor-0", Role.ROLLOUT, other)
        assert isinstance(refused, Refusal)
        assert refused.reason is Reason.NOT_READY
        assert "opened by actor gpu-1" in refused.detail
    again = await store.open_session("actor-0", Role.ROLLOUT, "actor gpu-1")
    assert isinstance(again, Opened)
    await store.close_session(again.session)
    assert isinstance(await store.open_session("actor-0", Role.ROLLOUT, "actor gpu-2"), Opened)


@pytest.mark.promise("closed-session-refused-ever")
async def test_a_closed_session_is_refused_for_ever(store: Store, log: LearnerLog) -> None:
    actor = await new_actor(store)
    await store.close_session(actor.session)
    await store.close_session(actor.session)
    refused = (await actor.append()).refusal
    assert refused is not None
    assert refused.reason is Reason.EXPIRED
    watched = await store.watch(Watch(session=actor.session))
    assert watched.refusal is not None
    assert watched.refusal.reason is Reason.EXPIRED


async def test_a_stopping_run_opens_no_session_but_accepts_remaining_fragments(
    store: Store, log: LearnerLog
) -> None:
    actor = await new_actor(store)
    await store.control("stop", "enough")
    assert (await actor.append()).refusal is None
    refusal = await store.open_session("actor-1", Role.ROLLOUT)
    assert isinstance(refusal, Refusal)
    assert refusal.reason is Reason.RUN_CLOSED


@pytest.mark.promise("fragment-sent-again-acknowledged")
async def test_append_is_idempotent_and_in_order(store: Store, log: LearnerLog) -> None:
    actor = await new_actor(store)
    await actor.watch()
    assert (await actor.append(2)).appended == 2
    again = await store.append(actor.session, 0, [item(actor.session, s) for s in (1, 2, 3)])
    assert (again.acked_through, again.appended, again.refusal) == (3, 1, None)
    gap = await store.append(actor.session, 3, [item(actor.session, 5)])
    assert gap.refusal is not None
    assert (gap.refusal.reason, gap.refusal.expected) == (Reason.GAP, 4)
    assert [entry.header.sequence for entry in log.read(0, 10, 0) if entry.header] == [1, 2, 3]
    assert 3 == log.acked() == log.residue(0).entries


async def test_a_run_opens_no_sessions_beyond_its_limit(
    store: Store, log: LearnerLog, raw: "redis.Redis"
) -> None:
    honest = await new_actor(store, "honest")
    now_ms = time.time() * 1000
    raw.zadd(keys.OPEN, {f"{10**6 + index}": now_ms for index in range(scripts.MAX_SESSIONS)})
    refused = await store.open_session("one-more", Role.ROLLOUT)
    assert isinstance(refused, Refusal)
    assert (refused.reason, refused.detail.partition(":")[0]) == (Reason.FULL, "sessions")
    assert (await honest.append()).refusal is None
    raw.zremrangebyrank(keys.OPEN, -2, -1)
    assert isinstance(await store.open_session("one-more", Role.ROLLOUT), Opened)


async def test_a_fragment_of_weights_from_the_future_is_invalid(store: Store, log: LearnerLog) -> None:
    actor = await new_actor(store)
    good = item(actor.session, 1)
    (span,) = good.header.weights
    future = replace(good, header=replace(good.header, weights=(span._replace(version=2),)))
    reply = await store.append(actor.session, 0, [future])
    assert reply.refusal is not None
    assert (reply.refusal.reason, reply.appended, log.acked()) == (Reason.INVALID, 0, 0)
    assert "version 2 was never published" in reply.refusal.detail
    assert (await store.append(actor.session, 0, [good])).refusal is None


@pytest.mark.promise("acknowledged-fragments-never-expire")
async def test_a_payload_in_the_log_never_expires(
    redis_url: str, log: LearnerLog, raw: "redis.Redis"
) -> None:
    short = Store.connect(redis_url, staging_expiry_s=0.2)
    actor = await new_actor(short)
    await actor.append(3)
    assert [raw.ttl(keys.payload(number)) for number in (1, 2, 3)] == [-1, -1, -1]
    raw.set("other", b"", px=300)
    while raw.exists("other"):
        pass
    expected = item(actor.session, 1).payload
    assert [expected] * 3 == log.fetch([1, 2, 3])
    await short.aclose()


async def test_a_lost_staging_key_is_answered_full(redis_url: str, log: LearnerLog) -> None:
    actor = Actor(Store.connect(redis_url), "actor-0")
    await actor.open()
    script = scripts.load("append")
    header = item(actor.session, 1)
    with redis.Redis.from_url(redis_url) as client:
        reply = client.eval(
            script.source,
            1,
            "penstock:staging:gone",
            actor.session,
            0,
            1,
            CHARGE,
            1,
            9,
            header.header_bytes,
            1,
            "",
        )
    assert reply[2][:4] == [b"FULL", b"staging", 0, 0]
    assert (await actor.append()).refusal is None
    await actor.store.aclose()


@pytest.mark.promise("ceiling-log-stays-below")
async def test_limits_refuse_entries_and_keep_the_log_below_them(store: Store, begin: Begin) -> None:
    budget = 100 * CHARGE
    log = begin(budget=budget, max_log_entries=3, max_log_bytes=2**20)
    actor = await new_actor(store)
    reply = await actor.append(5)
    assert reply.refusal is not None
    assert (reply.acked_through, reply.refusal.reason) == (3, Reason.FULL)
    assert reply.refusal.detail.startswith("log_entries")
    assert reply.refusal.retry_after_ms > 0
    size = max(entry.held_bytes for entry in log.read(0, 3, 0))
    ceiling = 4 * size + size // 2
    log.start(specification().encode(), replace(PACING, max_log_bytes=ceiling, budget=budget))
    reply = await actor.append(5)
    assert reply.refusal is not None
    assert (reply.acked_through, reply.refusal.detail.startswith("log_bytes")) == (4, True)
    assert log.status().log_bytes == sum(entry.held_bytes for entry in log.read(0, 9, 0)) <= ceiling


@pytest.mark.promise("fragment-steps-run-however")
async def test_a_fragment_of_more_steps_than_those_of_the_run_is_invalid(
    store: Store, log: LearnerLog
) -> None:
    actor = await new_actor(store)
    await actor.watch()
    large = item(actor.session, 1, steps=STEPS + 1)
    appended = await store.append(actor.session, 0, [large])
    assert appended.refusal is not None
    assert (appended.acked_through, appended.refusal.reason) == (0, Reason.INVALID)
    assert f"{large.header.charge} steps" in appended.refusal.detail
    assert f"{CHARGE} at most" in appended.refusal.detail
    assert log.read(0, 10, 0) == []
    assert (await store.append(actor.session, 0, [item(actor.session, 1)])).acked_through == 1


async def test_a_sequence_without_credit_is_invalid_for_a_rollout_worker(store: Store, begin: Begin) -> None:
    begin(budget=CHARGE)
    actor = await new_actor(store)
    assert actor.credit.begin_through == 1
    reply = await actor.append(2)
    assert reply.refusal is not None
    assert (reply.acked_through, reply.refusal.reason) == (1, Reason.INVALID)


async def test_an_evaluation_session_appends_nothing(store: Store, log: LearnerLog) -> None:
    actor = await new_actor(store, "evaluation-0", role=Role.EVALUATION)
    reply = await actor.append()
    assert reply.refusal is not None
    assert Reason.INVALID is reply.refusal.reason


@pytest.mark.promise("shadow-fragments-count")
async def test_shadow_fragments_are_in_no_count(store: Store, log: LearnerLog, raw: "redis.Redis") -> None:
    server = await new_actor(store, "server-0", role=Role.SERVER)
    for _ in range(5):
        await server.append(250, kind=Kind.SHADOW)
    assert raw.xlen(keys.SHADOW) == scripts.MAX_SHADOW_ENTRIES
    assert len(raw.keys(keys.SHADOW_PAYLOAD + "*")) == scripts.MAX_SHADOW_ENTRIES
    assert 0 == log.acked() == log.residue(0).entries
    await server.append()
    assert log.acked() == 1


async def test_reports_are_idempotent_in_order_and_read_by_position(store: Store, log: LearnerLog) -> None:
    actor = await new_actor(store)
    episode = Episode(slot_id=0, episode_id=1, episode_return=1.5, length=3, terminated=True, version=1)

    def report(sequence: int) -> Report:
        return Report(session=actor.session, sequence=sequence, episodes=(episode,))

    assert await store.report(report(1)) == (1, None)
    assert await store.report(report(1)) == (1, None)
    taken, refusal = await store.report(report(3))
    assert refusal is not None
    assert (taken, refusal.reason, refusal.expected) == (1, Reason.GAP, 2)
    assert await store.report(report(2)) == (2, None)
    entries = log.read_reports(0, 10)
    assert [(e.number, e.actor_id, e.report.sequence) for e in entries] == [
        (1, "actor-0", 1),
        (2, "actor-0", 2),
    ]
    assert [entry.number for entry in log.read_reports(1, 10)] == [2]


@pytest.mark.promise("evaluation-sessions-report-evaluations")
@pytest.mark.parametrize("role", [Role.ROLLOUT, Role.SERVER])
async def test_only_an_evaluation_session_reports_an_evaluation(
    store: Store, log: LearnerLog, role: Role
) -> None:
    actor, evaluator = (
        await new_actor(store, "actor-0", role=role),
        await new_actor(store, "eval-0", role=Role.EVALUATION),
    )
    episode = Episode(slot_id=0, episode_id=1, episode_return=500.0, length=500, terminated=False, version=1)

    def report(session: int, *, evaluation: bool) -> Report:
        return Report(session=session, sequence=1, evaluation=evaluation, episodes=(episode,))

    taken, refusal = await store.report(report(actor.session, evaluation=True))
    assert refusal is not None
    assert (taken, refusal.reason) == (0, Reason.INVALID)
    assert "evaluation=true" in refusal.detail
    assert log.read_reports(0, 10) == []
    assert await store.report(report(actor.session, evaluation=False)) == (1, None)
    assert await store.report(report(evaluator.session, evaluation=True)) == (1, None)


async def test_reports_above_a_number_or_size_drop_the_oldest(
    store: Store, log: LearnerLog, raw: "redis.Redis"
) -> None:
    actor = await new_actor(store)
    episode = Episode(slot_id=0, episode_id=1, episode_return=1.5, length=3, terminated=True, version=1)
    most = scripts.MAX_REPORT_ENTRIES
    first = Report(session=actor.session, sequence=1, episodes=(episode,))
    assert await store.report(first) == (1, None)
    # As many calls would take seconds.
    pipeline = raw.pipeline()
    for number in range(2, most + 1):
        pipeline.xadd(keys.REPORTS, {"a": "actor-0", "b": first.encode()}, id=f"{number}-0")
    pipeline.hset(keys.STATE, mapping={"reports": most, "report_bytes": most * len(first.encode())})
    pipeline.hset(keys.SESSION + str(actor.session), "reports", most)
    pipeline.execute()
    for sequence in (most + 1, most + 2):
        report = Report(session=actor.session, sequence=sequence, episodes=(episode,))
        assert await store.report(report) == (sequence, None)
    assert raw.xlen(keys.REPORTS) == most
    assert log.read_reports(0, 1)[0].number == 3
    many = (replace(episode, episode_id=2**40, length=2**20),) * 4096
    size = len(Report(session=actor.session, sequence=most + 3, episodes=many).encode())
    sent = scripts.MAX_REPORT_BYTES // size + 2
    for sequence in range(most + 3, most + 3 + sent):
        report = Report(session=actor.session, sequence=sequence, episodes=many)
        assert await store.report(report) == (sequence, None)
    entries: list[Any] = raw.xrange(keys.REPORTS)  # type: ignore[assignment]
    assert len(entries) == scripts.MAX_REPORT_BYTES // size
    assert sum(len(fields[b"b"]) for _, fields in entries) <= scripts.MAX_REPORT_BYTES
    assert [entry.number for entry in log.read_reports(0, 10_000)][-1] == most + 2 + sent


async def test_watch_tells_the_newest_weights_and_scalars(store: Store, log: LearnerLog) -> None:
    actor = await new_actor(store)
    publication = log.publish(b"x" * 9, update=3, settled=0, scalars={"epsilon": 0.25})
    watched = await store.watch(Watch(session=actor.session))
    assert watched.news is not None
    assert publication == watched.news.latest
    assert watched.news.scalars == {"epsilon": 0.25}
    assert RunState.RUNNING is watched.news.state


async def test_only_evaluation_sessions_are_asked_to_evaluate(store: Store, log: LearnerLog) -> None:
    rollout, evaluation = (
        await new_actor(store, "actor-0"),
        await new_actor(store, "eval-0", role=Role.EVALUATION),
    )
    log.request_evaluation(1)
    asked = [await store.watch(Watch(session=actor.session)) for actor in (rollout, evaluation)]
    assert [watched.news.evaluate_version for watched in asked if watched.news] == [0, 1]


async def test_the_end_of_one_evaluation_does_not_take_back_the_next_request(
    store: Store, log: LearnerLog
) -> None:
    first, second = (log.publish(BLOB, update=u, settled=0, scalars={}, pin=True).version for u in (1, 2))
    log.request_evaluation(first)
    log.request_evaluation(second)
    log.end_evaluation(first)
    assert log.renew().evaluate_version == second
    log.end_evaluation(second)
    assert log.renew().evaluate_version == 0


@pytest.mark.promise("weights-evaluation-pinned-released")
async def test_pins_of_a_learner_that_died_do_not_keep_their_bytes(
    store: Store, log: LearnerLog, begin: Begin
) -> None:
    pinned = log.publish(BLOB, update=1, settled=0, scalars={}, pin=True).version
    log.request_evaluation(pinned)
    resumed = begin()
    assert resumed.renew().evaluate_version == 0
    resumed.publish(BLOB, update=2, settled=0, scalars={})
    assert await store.publication(pinned) is None
    assert await store.weights_chunk(pinned, 0) is None


async def test_control_is_followed_and_stopping_is_not_taken_back(store: Store, log: LearnerLog) -> None:
    start = log.renew().revision
    assert (start + 1, RunState.PAUSED) == await store.control("pause")
    assert (start + 1, RunState.PAUSED) == await store.control("pause")
    assert (start + 2, RunState.PAUSED) == await store.control("checkpoint")
    assert (start + 2, RunState.PAUSED) == (log.renew().checkpoint_revision, log.renew().desired)
    assert (start + 3, RunState.RUNNING) == await store.control("resume")
    assert (start + 4, RunState.STOPPING) == await store.control("stop")
    assert (start + 4, RunState.STOPPING) == await store.control("resume")


@pytest.mark.promise("stop-asked-survives-learner")
async def test_a_stop_outlives_a_learner_that_crashes_and_ends_with_one_that_followed_it(
    store: Store, log: LearnerLog, redis_url: str
) -> None:
    await store.control("stop")
    crashed = open_run(redis_url)
    assert crashed.renew().desired is RunState.STOPPING
    crashed.release()
    resumed = open_run(redis_url)
    assert resumed.renew().desired is RunState.RUNNING
    await store.control("stop")
    assert open_run(redis_url).renew().desired is RunState.STOPPING


@pytest.mark.promise("lease-holder-another-learner")
def test_the_lease_is_for_one_holder(redis_url: str, log: LearnerLog) -> None:
    other = LearnerLog.connect(redis_url, wait_s=1)
    with pytest.raises(Refused) as refused:
        other.acquire(RUN, "other", TTL_MS)
    assert Reason.FENCED is refused.value.refusal.reason
    assert 0 < refused.value.refusal.retry_after_ms <= TTL_MS + 1
    assert other.acquire(RUN, "learner", TTL_MS).epoch == 2
    with pytest.raises(Refused, match="fenced"):
        log.renew()
    with pytest.raises(Refused, match="fenced"):
        log.publish(BLOB, update=1, settled=0, scalars={})
    other.close()


def test_a_redis_of_another_run_is_refused(redis_url: str, log: LearnerLog) -> None:
    with pytest.raises(ConfigurationError, match="holds run 'run-a', not 'run-b'"):
        log.acquire("run-b", "learner", TTL_MS)


@pytest.mark.promise("weights-newest-two-versions")
async def test_weights_are_kept_for_two_versions_and_for_pins(store: Store, log: LearnerLog) -> None:
    blob = bytes(2 * WEIGHT_CHUNK_BYTES + 5)
    pinned = log.publish(blob, update=1, settled=0, scalars={}, pin=True)
    for update in (2, 3, 4):
        log.publish(b"small", update=update, settled=0, scalars={})
    assert pinned == await store.publication(pinned.version)
    chunks = [await store.weights_chunk(pinned.version, index) for index in range(4)]
    assert [len(chunk) for chunk in chunks if chunk] == [WEIGHT_CHUNK_BYTES, WEIGHT_CHUNK_BYTES, 5]
    kept = [version for version in range(1, 6) if await store.publication(version)]
    assert kept == [2, 4, 5]
    log.end_evaluation(pinned.version)
    assert await store.publication(pinned.version) is None
    assert await store.weights_chunk(pinned.version, 0) is None


async def test_a_late_publication_moves_nothing_back(store: Store, log: LearnerLog) -> None:
    published: list[tuple[object, ...]] = []
    fenced = log._calls.fenced

    def noting(name: str, *arguments: object) -> object:
        if name == "publish":
            published.append(arguments)
        return fenced(name, *arguments)

    log._calls.fenced = noting  # type: ignore[method-assign]
    older = log.publish(BLOB, update=1, settled=0, scalars={})
    newer = log.publish(BLOB, update=2, settled=0, scalars={})
    assert older.version < newer.version
    fenced("publish", *published[0])
    status = await store.status()
    assert (status.latest.version, status.latest.update) == (newer.version, 2)


@pytest.mark.promise("commit-trims-committing-twice")
async def test_commit_trims_and_is_idempotent(store: Store, begin: Begin, raw: "redis.Redis") -> None:
    log = begin(budget=100 * CHARGE)
    actor = await new_actor(store)
    await actor.append(6)
    totals = Totals(trained=5, dropped={"stale": 1}, env_steps=40)
    commit = Commit(checkpoint_id="c1", manifest_sha256="aa", position=6, trim=4, totals=totals)
    log.commit(commit)
    log.commit(commit)
    renewal = log.renew()
    size = sum(entry.held_bytes for entry in log.read(4, 9, 0))
    assert (2, size, 6) == (renewal.log_entries, renewal.log_bytes, renewal.head)
    assert log.fetch([1, 2, 3, 4]) == [None] * 4
    assert 2 == log.residue(0).entries == len(raw.keys(keys.PAYLOAD + "*"))
    assert log.missing(4).value == "trimmed"
    again = log.acquire(RUN, "learner", TTL_MS)
    assert (commit,) == again.committed
    assert again.trim_floor == 4


async def test_a_start_behind_the_trim_floor_is_refused(store: Store, log: LearnerLog) -> None:
    actor = await new_actor(store)
    await actor.append(4)
    log.commit(Commit(checkpoint_id="c", manifest_sha256="", position=4, trim=3))
    with pytest.raises(Refused, match="allow-loss"):
        log.start(specification().encode(), PACING, position=2)
    log.start(specification().encode(), PACING, position=3)


@pytest.mark.promise("learner-reads-once-bounded")
async def test_large_payloads_are_read_a_few_at_a_time(
    store: Store, log: LearnerLog, raw: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = await new_actor(store)
    await actor.append(4)
    size = raw.strlen(keys.payload(1))
    monkeypatch.setattr(learner_log, "READ_BYTES", 2 * size + 1)
    entries = log.read(0, 10, 0)
    before = (
        raw.info("commandstats")["cmdstat_mget"]["calls"] if "cmdstat_mget" in raw.info("commandstats") else 0
    )
    payloads = log.fetch([entry.number for entry in entries], [entry.size for entry in entries])
    assert [len(payload or b"") for payload in payloads] == [size] * 4
    assert raw.info("commandstats")["cmdstat_mget"]["calls"] - before == 2
