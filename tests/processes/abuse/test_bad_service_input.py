"""Bad input of services, as processes: told with key, value and remedy, and all stays as it was.

Each of them is refused before the service waits for anybody, so none hangs where its peers are absent.
"""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

from penstock.launch.run.supervisor import penstock
from tests.support.run.solved_run import SOLVED_RUN

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
    "a broker at no port": ((*BROKER, "--listen", "127.0.0.1:99999"), "write HOST:PORT"),
    "a broker of no Redis": (("broker", "--redis", "banana"), "broker.redis=banana: write redis://"),
    "not UTF-8": ((*BROKER, "--config", "latin.toml"), "latin.toml: not UTF-8"),
    "a folder for TOML": ((*BROKER, "--config", "folder"), "folder: Is a directory"),
    "endpoints in no folder": ((*BROKER, "--endpoints", "absent/e"), "absent/e: absent is no folder"),
    "endpoints below a file": ((*BROKER, "--endpoints", "file/e"), "--endpoints file/e: file is no folder"),
    "endpoints in place of a folder": ((*BROKER, "--endpoints", "folder"), "--endpoints folder: is a folder"),
    "a learner in a file": ((*LEARNER, "--run-dir", "file", "--config", "run.toml"), "file: is a file"),
    "an actor of another alphabet": ((*ACTOR, "--actor-id", "Ünï"), "actor_id='Ünï' is not an id"),
    "an actor of no role": ((*ACTOR, "--role", "banana"), "'banana' is not one of 'rollout'"),
    "a server on a file": ((*SERVE, "--listen", "unix:file"), "unix:file: is no socket"),
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
    "a gateway of broken templates": ((*GATEWAY, "--templates", "templates"), "broken.toml: cannot be read"),
    "a gateway of no UTF-8": ((*GATEWAY, "--config", "latin.toml"), "latin.toml: not UTF-8"),
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
    "a run below a file": ((*TRAIN, "--run-dir", "file/x"), "--run-dir file/x: Not a directory"),
    "a run whose logs are a file": ((*TRAIN, "--run-dir", "logged"), "logged/logs: File exists"),
    "a run whose lock is a folder": ((*TRAIN, "--run-dir", "locked"), "locked/launcher.lock: Is a directory"),
    "rewards on no schedule": (
        (*REWARD, "--out", "o", "--set", "schedule=banana"), "schedule='banana': Input should be 'linear'",
    ),
    "rewards by a word": ((*REWARD, "--out", "o", "--set", "batch=banana"), "batch='banana'"),
    "scores of a file": (("rlhf", "reward", "serve", "file"), "file"),
    "embeddings for a network": (
        ("prompts", "embeddings", "--listen", "0.0.0.0:8766"),
        "0.0.0.0:8766: embeddings are served on this machine only",
    ),
}  # fmt: skip
LOAD_A_MODEL: Final = (
    "rewards into a file",
    "a head without a scale",
    "rewards on no schedule",
    "rewards by a word",
)
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
    (folder / "templates").mkdir()
    (folder / "templates" / "broken.toml").write_text("run = \n")
    (folder / "rows.jsonl").write_text('{"prompt": "a", "response": "b", "score": 1}\n')
    (folder / "latin.toml").write_bytes(b'run = "gr\xf6\xdfe"\n')
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
    done = subprocess.run(
        penstock(*words), cwd=here, capture_output=True, text=True, timeout=ENDS_S, check=False
    )
    assert done.returncode == 2, done.stderr
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert content(here) == before


def test_a_working_folder_that_was_deleted_is_told(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    words = ("sh", "-c", 'rmdir "$PWD" && exec "$@"', "sh", *penstock("doctor"))
    done = subprocess.run(
        words, cwd=tmp_path / "gone", capture_output=True, text=True, timeout=ENDS_S, check=False
    )
    assert done.returncode == 2
    assert done.stderr == "the working folder was deleted; change to one that is there\n"


def test_a_machine_without_room_for_sockets_is_told_what_to_do(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path / "absent"), "PATH": ""}
    done = subprocess.run(
        penstock("doctor"), env=environment, capture_output=True, text=True, timeout=ENDS_S, check=False
    )
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
