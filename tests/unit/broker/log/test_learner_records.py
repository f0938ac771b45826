"""What checkpoints and Redis keep of the log survives its way through text."""

import json

from penstock.broker.log.learner_log import LogMemory, to_lua
from penstock.broker.log.replies import Commit, LogEntry, LogState, Totals
from penstock.broker.log.script import names, read_source
from penstock.protocol.fragment import FragmentHeader, Slot, WeightSpan

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
