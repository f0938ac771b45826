import json
from collections.abc import Callable

import pytest

from penstock.broker.log import connection
from penstock.broker.log.connection import UnsuitableRedis
from penstock.broker.log.learner_log import LogMemory, to_lua
from penstock.broker.log.replies import Commit, LogEntry, LogState, Totals
from penstock.broker.log.script import names, read_source
from penstock.config.settings import BrokerSection
from penstock.protocol.fragment import FragmentHeader, Slot, WeightSpan
from penstock.protocol.limits import MIB
from penstock.protocol.messages import Durability


@pytest.mark.parametrize(
    "version", ["6.2.20", "7.2.11", "7.4.7", "8.0.4", "8.2.2", "8.4.0", "8.6.3", "8.8.0", "9.0.1"]
)
def test_a_patched_redis_release_is_accepted_everywhere(version: str) -> None:
    assert connection.check_version(version, private=True) == ""
    assert connection.check_version(version, private=False) == ""


@pytest.mark.parametrize("version", ["6.2.14", "7.0.15", "7.2.4", "7.4.5", "8.0.3", "8.6.2"])
def test_a_release_below_its_security_floor_is_refused_over_tcp(version: str) -> None:
    with pytest.raises(UnsuitableRedis, match=f"redis_version={version}.*unix socket"):
        connection.check_version(version, private=False)
    assert version in connection.check_version(version, private=True)


REFUSED: dict[str, Callable[[], object]] = {
    r"below 6\.2": lambda: connection.check_version("6.0.20", private=True),
    r"redis_version=2\.8.*below 6\.2": lambda: connection.check_version("2.8", private=True),
    "redis_version='unstable'": lambda: connection.check_version("unstable", private=True),
    "maxmemory_policy=volatile-ttl.*noeviction": lambda: connection.check_eviction(
        {"maxmemory_policy": "volatile-ttl"}
    ),
    "maxmemory_policy=allkeys-lru.*noeviction": lambda: connection.check_eviction(
        {"maxmemory_policy": "allkeys-lru"}
    ),
    "role=slave": lambda: connection.check_role({"role": "slave"}),
    "cluster": lambda: connection.check_role({"role": "master", "cluster_enabled": 1}),
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_server_that_may_hold_no_run_is_refused(words: str) -> None:
    with pytest.raises(UnsuitableRedis, match=words):
        REFUSED[words]()


@pytest.mark.parametrize(
    ("commands", "keys"),
    [
        (["-@all"], []),
        (["-@all"], ["~*"]),
        (["+@all"], ["~other:*"]),
        (["+@all", "-@write"], ["~*"]),
        (["+@all", "-xadd"], ["~*"]),
        (["+@read", "+@write"], ["~*"]),
    ],
)
def test_a_server_that_would_forget_at_a_restart_is_refused(commands: list[str], keys: list[str]) -> None:
    with pytest.raises(UnsuitableRedis, match="user default off resetpass"):
        connection.check_replay_rights(commands, keys)
    for enough in (["+@all", ""], ["+@all", "-@dangerous"]):
        connection.check_replay_rights(enough, ["~*"])


def test_limits_above_maxmemory_are_refused_with_the_figures() -> None:
    section = BrokerSection(max_log_bytes=100 * MIB, max_staged_bytes=20 * MIB)
    needed = (100 + 20 + 16 + 64) * MIB
    assert connection.check_memory({"maxmemory": needed}, section) == needed
    assert connection.check_memory({"maxmemory": 0}, section) == 0
    with pytest.raises(UnsuitableRedis, match=f"maxmemory={needed - 1}: {needed} bytes are needed"):
        connection.check_memory({"maxmemory": needed - 1}, section)


def test_durability_is_read_from_the_configuration() -> None:
    always = {"appendfsync": "always", "no-appendfsync-on-rewrite": "no"}
    assert connection.durability_of(always) is Durability.FSYNC
    once_a_second = (always | {"no-appendfsync-on-rewrite": "yes"}, {"appendfsync": "everysec"})
    assert {connection.durability_of(config) for config in once_a_second} == {Durability.FSYNC_1S}
    assert connection.durability_of({"appendfsync": "no"}) is Durability.MEMORY


@pytest.mark.parametrize("asked", list(Durability))
@pytest.mark.parametrize("given", list(Durability))
def test_less_durability_than_required_is_refused(given: Durability, asked: Durability) -> None:
    if given >= asked:
        connection.check_durability(given, asked)
    else:
        with pytest.raises(UnsuitableRedis, match=f"broker.durability={asked.label}.*appendfsync"):
            connection.check_durability(given, asked)


COMMIT = Commit(
    checkpoint_id="c",
    manifest_sha256="aa",
    position=7,
    trim=5,
    totals=Totals(trained=6, dropped={"stale": 1}),
)
STATE = LogState(
    run="run-a",
    epoch=3,
    number=9,
    steps_total=72,
    sequences={2: 5},
    commits=(COMMIT,),
    specification=b"\x00\xff",
)


def test_a_state_survives_the_manifest_and_redis_and_lua_gets_whole_numbers_and_texts() -> None:
    assert LogState.from_json(json.loads(json.dumps(STATE.to_json()))) == STATE
    assert Commit.decode(COMMIT.encode()) == COMMIT
    assert COMMIT.encode() == Commit.decode(COMMIT.encode()).encode()
    plain = to_lua(STATE)
    assert plain["sequences"] == {"2": 5}
    assert plain["commits"] == [COMMIT.encode()]
    assert "epoch" not in plain
    assert all(isinstance(plain[name], int) for name in ("number", "steps_total", "round", "version"))


def _entry(number: int, session: int, sequence: int) -> LogEntry:
    header = FragmentHeader(
        run="run-a",
        session=session,
        sequence=sequence,
        schema_id="",
        steps=1,
        slots=(Slot(0, 0, 0),),
        weights=(WeightSpan(0, 0, 1, 1, 0),),
        tensors=(),
    )
    return LogEntry(number=number, header=header, steps_total=number, size=1, round=0)


def test_memory_keeps_the_newest_of_everything_it_saw_and_no_more_than_a_bound() -> None:
    memory = LogMemory()
    memory.saw([_entry(1, 4, 1), _entry(2, 5, 1), _entry(3, 4, 2)])
    memory.saw([_entry(1, 4, 1)])
    state = memory.state
    assert (state.number, state.steps_total, state.session) == (3, 3, 5)
    assert state.sequences == {4: 2, 5: 1}
    memory.saw([_entry(number, number, 1) for number in range(4, 6001)])
    assert len(memory.state.sequences) <= 4096
    assert 6000 in memory.state.sequences


def test_every_writing_script_begins_with_the_delete_and_says_what_it_replies() -> None:
    reading = {"status", "missing", "commands", "confirm", "greet"}  # greet writes when Redis was restarted
    for name in names():
        lines = read_source(name).splitlines()
        assert any("Reply:" in line for line in lines), name
        code = [line for line in lines if line and not line.startswith(("--", "local", " "))]
        first = next((line for line in code if "redis.call" in line), "")
        assert name in reading or first == "redis.call('DEL', ABSENT)", name
