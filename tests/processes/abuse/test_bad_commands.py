"""Commands on bad input, and on a full or read-only disk: an error explains it, and no file changes."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from typer.testing import CliRunner

from penstock.client import PolicyClient
from penstock.launch.cli.app import app
from penstock.launch.run.supervisor import penstock
from penstock.launch.ui.catalogue import Catalogue
from penstock.registry.registry import Registry
from tests.support.run import harness
from tests.support.run.harness import command
from tests.support.run.serving_run import begun
from tests.support.run.solved_run import SOLVED_RUN
from tests.support.storage.small_disk import can_mount, small_disk

WRITING: Final = {
    "plot": (("plot", "RUN", "-o", "DISK/x.png"), "-o DISK/x.png: "),
    "record": (("record", "RUN", "--out", "DISK/r", "--steps", "10"), "--out DISK/r: "),
    "export": (("policy", "export", "RUN", "22", "-o", "DISK/x"), "-o DISK/x: "),
    "certificates": (("certificates", "DISK/c", "--run", "r"), "DISK/c: "),
    "keys": (("gateway", "keys", "DISK/k"), "DISK/k: "),
    "train": (("train", "CartPole-v1", "--run-dir", "DISK/r"), "--run-dir DISK/r: "),
}
PLACES: Final = {
    "full": "No space left on device; make room",
    "only read": "Read-only file system; name a place",
}

mounts = pytest.mark.skipif(not can_mount(), reason="a disk of its own needs the right to mount")


@pytest.fixture(scope="module", params=PLACES)
def disk(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path]]:
    folder = tmp_path_factory.mktemp("disk")
    with small_disk("tmpfs", folder, lambda: None) as small:
        small.fill(0)
        if request.param == "only read":
            small.free()
            subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        yield PLACES[request.param], folder


@mounts
@pytest.mark.parametrize(("words", "named"), WRITING.values(), ids=WRITING.keys())
def test_a_full_disk_is_reported_with_the_option_that_named_it(
    words: tuple[str, ...], named: str, disk: tuple[str, Path]
) -> None:
    told, folder = disk
    given = [word.replace("RUN", str(SOLVED_RUN)).replace("DISK", str(folder)) for word in words]
    done = command(*given)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(named.replace("DISK", str(folder)) + told), last
    assert {file.name for file in folder.iterdir() if file.is_file()} <= {"ballast"}
    assert list(folder.rglob("*.tmp")) == []


ENDS_S: Final = 120
"""A service that waits for a peer would do so for longer, or for ever."""
BROKER: Final = ("broker", "--redis", "unix:///absent/redis.sock")
LEARNER: Final = ("learner", "--redis", "unix:///absent/redis.sock")
ACTOR: Final = ("actor", "--broker", "unix:///absent/broker.sock")
SERVE: Final = ("serve", "--run", "run")
GATEWAY: Final = ("gateway", "--listen", "127.0.0.1:0")
PROMPTS: Final = ("gateway", "prompts", "--listen", "127.0.0.1:0")
CHAT: Final = ("gateway", "chat", "--listen", "127.0.0.1:0")
TEXT: Final = ("gateway", "text", "--server", "unix:absent", "--listen", "127.0.0.1:0")
TRAIN: Final = ("train", "CartPole-v1", "--total-steps", "64")
INJECT: Final = ("inject", "--simulated", "0")
REWARD: Final = ("rlhf", "reward", "train", "rows.jsonl", "--model", "folder")

REFUSED: Final = {
    "redis on a file": (("redis", "--socket", "file", "--dir", "d"), "is no socket, and is left as it is"),
    "redis in no folder": (("redis", "--socket", "absent/s", "--dir", "d"), "absent is no folder; make it"),
    "redis at a long path": (("redis", "--socket", "x" * 200, "--dir", "d"), "longer than the 107 bytes"),
    "a broker on a file": ((*BROKER, "--listen", "unix:file"), "unix:file: is no socket"),
    "a broker nowhere": ((*BROKER, "--listen", "banana"), "address='banana': write HOST:PORT"),
    "a broker of no Redis": (("broker", "--redis", "banana"), "broker.redis=banana: write redis://"),
    "endpoints in no folder": ((*BROKER, "--endpoints", "absent/e"), "absent/e: absent is no folder"),
    "endpoints in place of a folder": ((*BROKER, "--endpoints", "folder"), "--endpoints folder: is a folder"),
    "a learner in a file": ((*LEARNER, "--run-dir", "file", "--config", "run.toml"), "file: is a file"),
    "an actor of another alphabet": ((*ACTOR, "--actor-id", "Ünï"), "actor_id='Ünï' is not an id"),
    "an actor of no role": ((*ACTOR, "--role", "banana"), "'banana' is not one of 'rollout'"),
    "a server of a file": (("serve", "--run", "file"), "file/policies/policy.json: "),
    "a server beyond loopback": ((*SERVE, "--listen", "0.0.0.0:0"), "plaintext beyond loopback"),
    "a page on a word": (("ui", "run", "--listen", "banana"), "--listen banana: write HOST:PORT"),
    "a chat with no run": ((*CHAT, "--run", "absent"), "--run absent: no folder of a run"),
    "a chat of no recipe": ((*CHAT, "--recipe", "absent.toml"), "--recipe absent.toml: no such file"),
    "a chat beyond loopback": (
        ("gateway", "chat", "--listen", "0.0.0.0:0", "--insecure"), "beyond this machine a token",
    ),
    "a gateway nowhere": (("gateway", "--listen", "banana"), "--listen banana: write HOST:PORT"),
    "a gateway beyond loopback": (("gateway", "--listen", "0.0.0.0:0"), "would travel in plaintext"),
    "a gateway of no certificate": (
        (*GATEWAY, "--set=security.tls_certificate=absent", "--set=security.tls_key=absent"), "security: ",
    ),
    "a gateway below a file": ((*GATEWAY, "--state", "file"), "--state file: File exists; name a folder"),
    "a gateway of no registry": ((*GATEWAY, "--registry", "banana"), "--registry: registry url: not a URL"),
    "a gateway without templates": ((*GATEWAY, "--templates", "absent"), "--templates absent: no folder"),
    "text of no server": ((*TEXT, "--server", "banana"), "--server: address='banana': write HOST:PORT"),
    "text of no agent": (
        ("gateway", "text", "--agent", "a=nowhere", "--listen", "127.0.0.1:0"),
        "--agent: address='nowhere': write",
    ),
    "text of nobody": (("gateway", "text", "--listen", "127.0.0.1:0"), "--server: name the server of text"),
    "text beyond loopback": ((*TEXT, "--listen", "0.0.0.0:1"), "it answers this machine alone"),
    "text on a socket": ((*TEXT, "--listen", "unix:s"), "--listen unix:s: write HOST:PORT"),
    "prompts of no server": ((*PROMPTS, "--server", "banana"), "--server: address='banana': write HOST:PORT"),
    "prompts of no run": ((*PROMPTS, "--run", "absent"), "--run absent: no folder of a run"),
    "prompts of two": ((*PROMPTS, "--run", "r", "--server", "unix:s"), "--run, --server: name one of them"),
    "prompts of a broker alone": ((*PROMPTS, "--broker", "unix:s"), "--broker: belongs to --server"),
    "prompts of no recipe": ((*PROMPTS, "--recipe", "absent"), "--recipe absent: no such file"),
    "prompts below a file": ((*PROMPTS, "--state", "file"), "--state file: File exists; name a folder"),
    "prompts beyond loopback": ((*PROMPTS, "--listen", "0.0.0.0:1", "--insecure"), "say --project NAME"),
    "an injector without goals": (("inject",), "--goals FILE or --simulated SEED: name one of them"),
    "an injector of a word": (("inject", "--goals", "absent"), "absent: cannot be read"),
    "an injector of no hours": ((*INJECT, "--quiet", "22-6"), "--quiet: quiet hours '22-6': write"),
    "an injector of no server": ((*INJECT, "--server", "banana"), "--server banana: address='banana': write"),
    "an injector in a file": ((*INJECT, "--folder", "file"), "--folder file: File exists; name a folder"),
    "rewards into a file": ((*REWARD, "--out", "file"), "file"),
    "rewards from no model": ((*REWARD, "--out", "o"), "folder"),
    "a loop of no run": (("chat", "loop", "run", "absent"), "absent: no folder of a run"),
    "a loop of no labels": (
        ("chat", "loop", "run", "absent", "--labels", "0"), "--labels 0: must be at least 1",
    ),
    "a loop that is not asked for": ((*CHAT, "--loop", "labels=1"), "--loop labels=1: belongs to --learn"),
    "an option of a loop without a value": (
        (*CHAT, "--learn", "--loop", "labels"), "--loop 'labels': write OPTION=VALUE",
    ),
    "a loop of a server": (
        (*CHAT, "--learn", "--server", "localhost:1"), "--learn: needs the folder of the run",
    ),
    "a loop that there is not": (
        ("gateway", "prompts", "--listen", "127.0.0.1:0", "--learn"), "--learn: prompts has no loop",
    ),
    "a base of no file": (("chat", "pretrain", "absent", "--out", "o"), "absent: cannot be read"),
    "a head without a scale": ((*REWARD, "--out", "o", "--head", "charm"), "head 'charm': write NAME=SCALE"),
    "a run in a file": ((*TRAIN, "--run-dir", "file"), "--run-dir file: File exists; a file stands"),
    "a run whose logs are a file": ((*TRAIN, "--run-dir", "logged"), "logged/logs: File exists"),
    "a run whose lock is a folder": ((*TRAIN, "--run-dir", "locked"), "locked/launcher.lock: Is a directory"),
    "rewards on no schedule": (
        (*REWARD, "--out", "o", "--set", "schedule=banana"), "schedule='banana': Input should be 'linear'",
    ),
    "scores of a file": (("rlhf", "reward", "serve", "file"), "file"),
    "embeddings for a network": (
        ("prompts", "embeddings", "--listen", "0.0.0.0:8766"),
        "0.0.0.0:8766: embeddings are served on this machine only",
    ),
}  # fmt: skip
LOAD_A_MODEL: Final = ("rewards into a file", "a head without a scale", "rewards on no schedule")
"""Commands that import what language models need before they refuse, as others here do."""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, somebody's file, a folder, and a configuration that is no UTF-8."""
    folder = tmp_path_factory.mktemp("here")
    (folder / "file").write_bytes(b"somebody's")
    (folder / "folder").mkdir()
    (folder / "locked" / "launcher.lock").mkdir(parents=True)
    (folder / "logged").mkdir()
    (folder / "logged" / "logs").write_bytes(b"somebody's")
    (folder / "logged" / "launcher.lock").touch()
    (folder / "rows.jsonl").write_text('{"prompt": "a", "response": "b", "score": 1}\n')
    (folder / "run.toml").write_text('run = "r"\n[environment]\nid = "CartPole-v1"\n')
    shutil.copytree(SOLVED_RUN, folder / "run")
    return folder


def content(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder by name; None for what is no file."""
    found = folder.rglob("*")
    return {str(one.relative_to(folder)): one.read_bytes() if one.is_file() else None for one in found}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        pytest.param(*case, id=name, marks=[pytest.mark.slow] if name in LOAD_A_MODEL else [])
        for name, case in REFUSED.items()
    ],
)
def test_a_service_refuses_bad_input_and_changes_nothing(
    words: tuple[str, ...], told: str, here: Path
) -> None:
    before = content(here)
    done = command(*words, cwd=here, timeout=ENDS_S)
    assert done.returncode == 2, done.stderr
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert content(here) == before


def test_a_working_folder_that_was_deleted_is_reported(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    words = ("sh", "-c", 'rmdir "$PWD" && exec "$@"', "sh", *penstock("doctor"))
    done = subprocess.run(
        words, cwd=tmp_path / "gone", capture_output=True, text=True, timeout=ENDS_S, check=False
    )
    assert done.returncode == 2
    assert done.stderr == "the working folder was deleted; change to one that is there\n"


def test_doctor_reports_a_machine_without_room_for_sockets(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path / "absent"), "PATH": ""}
    done = command("doctor", env=environment, timeout=ENDS_S)
    assert done.returncode in {0, 1}
    assert done.stderr == ""
    checks = [line[5:].split()[0] for line in done.stdout.splitlines()]
    assert checks == ["python", "packages", "torch", "redis", "sockets", "disk"]


def test_the_name_of_a_file_is_printed_byte_for_byte(here: Path, tmp_path: Path) -> None:
    file = os.fsencode(tmp_path) + b"/gr\xf6\xdfe.png"
    done = subprocess.run(
        [*penstock("plot", "run", "-o"), file], cwd=here, capture_output=True, timeout=ENDS_S, check=False
    )
    assert (done.returncode, done.stdout) == (0, file + b"\n"), done.stderr
    assert Path(os.fsdecode(file)).is_file()


ROW: Final = np.zeros(4, np.float32)


def written(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file: when it was written, and what it holds."""
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): (file.stat().st_mtime_ns, file.read_bytes()) for file in files}


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """An empty folder to mount on; nothing is mounted there afterwards."""
    folder = tmp_path / "read_only"
    folder.mkdir()
    yield folder
    subprocess.run(["umount", str(folder)], check=False, capture_output=True)


def mount_read_only(source: Path, target: Path) -> None:
    subprocess.run(["mount", "--bind", str(source), str(target)], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", str(target)], check=True)
    with pytest.raises(OSError, match="Read-only file system"):
        (target / "written").touch()


COMMANDS: Final = {
    "list": ("policy", "list", "RUN"),
    "show": ("policy", "show", "RUN", "22"),
    "traffic": ("policy", "traffic", "RUN"),
    "evaluate": ("evaluate", "RUN", "--episodes", "1"),
    "plot": ("plot", "RUN", "-o", "OUT.png"),
    "export": ("policy", "export", "RUN", "22", "-o", "OUT.safetensors"),
    "audit": ("audit", "RUN"),
}


@mounts
@pytest.mark.promise("run-read-listed-played")
@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS.keys())
def test_reading_commands_work_on_a_read_only_run(
    words: tuple[str, ...], mounted: Path, tmp_path: Path
) -> None:
    before = written(SOLVED_RUN)
    mount_read_only(SOLVED_RUN, mounted)
    given = [word.replace("RUN", str(mounted)).replace("OUT", str(tmp_path / "out")) for word in words]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, (done.output, done.exception)
    assert written(SOLVED_RUN) == before


@mounts
@pytest.mark.parametrize(
    "words",
    [("plot", "RUN"), ("train", "--resume", "RUN"), ("policy", "promote", "RUN", "22", "--reason", "x")],
)
def test_a_command_that_would_write_there_says_so(words: tuple[str, ...], mounted: Path) -> None:
    mount_read_only(SOLVED_RUN, mounted)
    given = [str(mounted) if word == "RUN" else word for word in words]
    done = command(*given)
    assert done.returncode in (1, 2), done.stderr
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert "Read-only file system" in last or "only read" in last


@mounts
def test_the_page_shows_a_read_only_run(mounted: Path) -> None:
    mount_read_only(SOLVED_RUN, mounted)
    (run,) = Catalogue(mounted).runs()
    assert run.facts().state in ("solved", "ended")
    assert run.curve()["env_steps"]


@mounts
@pytest.mark.promise("run-read-listed-played")
def test_a_server_answers_from_a_read_only_run(mounted: Path, tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    before = written(run.folder)
    mount_read_only(run.folder, mounted)
    with (
        harness.server(tmp_path / "server", mounted) as server,
        PolicyClient(server.address, deadline_s=60.0) as client,
    ):
        assert client.act(ROW).version > 0
        episode = client.start_episode()
        episode.act(ROW)
        episode.reward(1.0)
        episode.end(terminated=True)
        assert client.act(ROW).version > 0
    assert written(run.folder) == before


def test_an_empty_file_is_not_turned_into_a_registry(tmp_path: Path) -> None:
    file = tmp_path / "empty.sqlite"
    file.touch()
    done = CliRunner().invoke(app, ("policy", "list", f"sqlite:///{file}"))
    assert done.exit_code in (1, 2)
    assert isinstance(done.exception, SystemExit)
    assert file.read_bytes() == b""
    assert list(tmp_path.iterdir()) == [file]


def test_reading_a_registry_open_in_another_process_sees_its_commits(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'registry.sqlite'}"
    with Registry.open(url, migrate=True) as writer, Registry.read(url) as reader:
        written = writer.traffic("default")
        assert reader.traffic("default") == written
