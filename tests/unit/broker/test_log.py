import json
from typing import Any

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

# ---- The guard: which Redis servers may hold a run.


@pytest.mark.parametrize(
    "version", ["6.2.20", "7.2.11", "7.4.7", "8.0.4", "8.2.2", "8.4.0", "8.6.3", "8.8.0", "9.0.1"]
)
@pytest.mark.parametrize("private", [True, False])
def test_a_fixed_release_passes_everywhere(version: str, *, private: bool) -> None:
    assert connection.check_version(version, private=private) == ""


@pytest.mark.parametrize("version", ["6.2.14", "7.0.15", "7.2.4", "7.4.5", "8.0.3", "8.6.2"])
def test_a_release_below_its_security_floor_is_refused_over_tcp(version: str) -> None:
    with pytest.raises(UnsuitableRedis, match=f"redis_version={version}.*unix socket"):
        connection.check_version(version, private=False)
    assert version in connection.check_version(version, private=True)


@pytest.mark.parametrize("version", ["5.0.14", "6.0.20", "2.8"])
def test_a_version_below_the_functional_floor_is_refused_everywhere(version: str) -> None:
    with pytest.raises(UnsuitableRedis, match=r"below 6\.2"):
        connection.check_version(version, private=True)


def test_something_that_is_no_version_is_refused() -> None:
    with pytest.raises(UnsuitableRedis, match="redis_version='unstable'"):
        connection.check_version("unstable", private=True)


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl", "allkeys-random"])
def test_a_server_that_may_evict_is_refused(policy: str) -> None:
    with pytest.raises(UnsuitableRedis, match=f"maxmemory_policy={policy}.*noeviction"):
        connection.check_eviction({"maxmemory_policy": policy})


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


@pytest.mark.parametrize("commands", [["+@all", ""], ["+@all", "-@dangerous"]])
def test_a_default_user_with_every_right_to_write_is_enough(commands: list[str]) -> None:
    connection.check_replay_rights(commands, ["~*"])


@pytest.mark.parametrize("info", [{"role": "slave"}, {"role": "master", "cluster_enabled": 1}])
def test_replicas_and_clusters_are_refused(info: dict[str, Any]) -> None:
    with pytest.raises(UnsuitableRedis):
        connection.check_role(info)


def test_ceilings_that_do_not_fit_below_maxmemory_are_refused_with_the_figures() -> None:
    section = BrokerSection(max_log_bytes=100 * MIB, max_staged_bytes=20 * MIB)
    needed = (100 + 20 + 16 + 64) * MIB
    assert connection.check_memory({"maxmemory": needed}, section) == needed
    assert connection.check_memory({"maxmemory": 0}, section) == 0
    with pytest.raises(UnsuitableRedis, match=f"maxmemory={needed - 1}: {needed} bytes are needed"):
        connection.check_memory({"maxmemory": needed - 1}, section)


@pytest.mark.parametrize(
    ("config", "given"),
    [
        ({"appendfsync": "always", "no-appendfsync-on-rewrite": "no"}, Durability.FSYNC),
        ({"appendfsync": "always", "no-appendfsync-on-rewrite": "yes"}, Durability.FSYNC_1S),
        ({"appendfsync": "everysec"}, Durability.FSYNC_1S),
        ({"appendfsync": "no"}, Durability.MEMORY),
    ],
)
def test_durability_is_what_the_configuration_gives(config: dict[str, str], given: Durability) -> None:
    assert connection.durability_of(config) is given


@pytest.mark.parametrize("asked", list(Durability))
@pytest.mark.parametrize("given", list(Durability))
def test_less_durability_than_asked_is_refused(given: Durability, asked: Durability) -> None:
    if given >= asked:
        connection.check_durability(given, asked)
    else:
        with pytest.raises(UnsuitableRedis, match=f"broker.durability={asked.label}.*appendfsync"):
            connection.check_durability(given, asked)


# ---- What checkpoints and Redis keep of the log survives its way through text.


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


def test_a_state_survives_the_manifest() -> None:
    assert LogState.from_json(json.loads(json.dumps(STATE.to_json()))) == STATE


def test_a_commit_survives_redis() -> None:
    assert Commit.decode(COMMIT.encode()) == COMMIT
    assert COMMIT.encode() == Commit.decode(COMMIT.encode()).encode()


def test_lua_gets_whole_numbers_and_texts() -> None:
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


def test_memory_keeps_the_newest_of_everything_it_saw() -> None:
    memory = LogMemory()
    memory.saw([_entry(1, 4, 1), _entry(2, 5, 1), _entry(3, 4, 2)])
    memory.saw([_entry(1, 4, 1)])
    state = memory.state
    assert (state.number, state.steps_total, state.session) == (3, 3, 5)
    assert state.sequences == {4: 2, 5: 1}


def test_memory_of_sequences_is_bounded() -> None:
    memory = LogMemory()
    memory.saw([_entry(number, number, 1) for number in range(1, 6001)])
    assert len(memory.state.sequences) <= 4096
    assert 6000 in memory.state.sequences


def test_every_writing_script_begins_with_the_delete() -> None:
    reading = {
        "status",
        "missing",
        "commands",
        "confirm",
        "greet",
    }  # greet writes only when Redis was restarted
    for name in set(names()) - reading:
        code = [
            line
            for line in read_source(name).splitlines()
            if line and not line.startswith(("--", "local", " "))
        ]
        assert next(line for line in code if "redis.call" in line) == "redis.call('DEL', ABSENT)", name


def test_every_script_says_what_it_takes_and_gives() -> None:
    for name in names():
        source = read_source(name)
        assert "-- Reply:" in source or "Reply:" in source, name
