"""An append-only file that somebody else wrote is data: redis-server carries out what stands in it.

It comes with the folder of a run, and `penstock audit` and `penstock train --resume` start a server on it.
"""

import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

from penstock.launch.run.supervisor import penstock
from tests.support.run.solved_run import SOLVED_RUN

ENDS_S: Final = 60
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
def test_an_audit_carries_out_nothing_of_a_foreign_log(words: tuple[str, ...], tmp_path: Path) -> None:
    run = shutil.copytree(SOLVED_RUN, tmp_path / "run")
    write_log(run / "redis", ("SELECT", "0"), words)
    done = subprocess.run(
        penstock("audit", str(run)), capture_output=True, text=True, check=False, timeout=ENDS_S
    )
    assert done.returncode == 1, done.stdout
    assert f"Unknown command '{words[0]}' reading the append only file" in done.stderr


@pytest.mark.promise("redis-started-somebody-else")
@pytest.mark.parametrize("words", REACHING.values(), ids=REACHING.keys())
def test_a_resumed_run_carries_out_nothing_of_a_foreign_log(
    words: tuple[str, ...], short_folder: Path
) -> None:
    write_log(short_folder / "redis", ("SELECT", "0"), words)
    command = ("redis", "--socket", str(short_folder / "s"), "--dir", str(short_folder / "redis"))
    done = subprocess.run(penstock(*command), capture_output=True, text=True, check=False, timeout=ENDS_S)
    assert done.returncode == 1, done.stderr
    assert f"Unknown command '{words[0]}' reading the append only file" in done.stderr


def test_a_log_of_data_is_read(tmp_path: Path) -> None:
    run = shutil.copytree(SOLVED_RUN, tmp_path / "run")
    write_log(run / "redis", ("SELECT", "0"), ("SET", "theirs", "1"))
    done = subprocess.run(
        penstock("audit", str(run)), capture_output=True, text=True, check=False, timeout=ENDS_S
    )
    assert done.returncode == 0, done.stderr
