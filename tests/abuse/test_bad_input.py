"""Bad input on the command line and in the configuration: exit 2 with key, value and remedy, no traceback.

In one process: services, which change the process that they are in, are not asked here.
"""

import json
import os
import shutil
import tomllib
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any, Final

import pytest
from typer.testing import CliRunner

from penstock.config.sections import Section
from penstock.config.settings import ConfigurationError, Settings, dump, load
from penstock.launch.cli.app import app
from tests.support.run.solved_run import SOLVED_RUN

LATIN: Final = "größe".encode("latin-1")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file where a folder is wanted and the other way round, and what is no UTF-8."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_bytes(b"somebody's")
    (tmp_path / "latin.toml").write_bytes(b'run = "' + LATIN + b'"\n')
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "used" / "logs").mkdir(parents=True)
    shutil.copytree(SOLVED_RUN, tmp_path / "run")
    (tmp_path / "sets").mkdir()
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    return tmp_path


TRAIN: Final = ("train", "CartPole-v1")
MIGRATE: Final = ("gateway", "migrate")
PERSON: Final = ("gateway", "user", "add", "--project", "p")
COMMANDS: Final = {
    "ratings of no file": (("chat", "ratings", "absent.jsonl", "-o", "o"), "absent.jsonl: no such file"),
    "a guard of no rows": (("chat", "guard", "train", "-o", "o", "--rows", "absent"), "--rows absent: "),
    "texts of no file": (("chat", "guard", "check", "absent"), "absent: cannot be read"),
    "a loop of no run": (("chat", "loop", "status", "absent"), "absent: no folder of a run"),
    "a loop of another workload": (("chat", "loop", "status", "run"), "run: is a run of workload 'control'"),
    "a pause of no run": (("chat", "loop", "pause", "absent", "--reason", "r"), "absent: no folder of a run"),
    "weights of no run": (
        ("chat", "loop", "weigh", "absent", "--weight", "safety=2", "--reason", "r"),
        "absent: no folder of a run",
    ),
    "a resume of no run": (("chat", "loop", "resume", "absent"), "absent: no folder of a run"),
    "giving up of no run": (
        ("chat", "loop", "abandon", "absent", "--reason", "r"),
        "absent: no folder of a run",
    ),
    "not UTF-8": (("train", "latin.toml"), "latin.toml: not UTF-8"),
    "a folder for TOML": (("train", "folder.toml"), "folder.toml: Is a directory"),
    "a date": ((*TRAIN, "--set", "environment.kwargs={d=1979-05-27}"), "environment.kwargs.d=1979-05-27: "),
    "NaN by a flag": ((*TRAIN, "--target-return", "nan"), "learner.target_return=nan: "),
    "infinity in kwargs": ((*TRAIN, "--set", "environment.kwargs={x=[-inf]}"), "environment.kwargs.x=-inf: "),
    "a seed with an alphabet of its own": ((*TRAIN, "--seed", "x٣"), "--seed"),
    "a secret in a URL": ((*TRAIN, "--redis", "redis://u:s3cret@h"), "security.redis_password_file=FILE"),
    "a secret in kwargs": (
        (*TRAIN, "--set", "environment.kwargs={reward='http://h/score?key=s3cret'}"),
        "security.http_headers_file=FILE",
    ),
    "resume nothing": (("train", "--resume", "sets"), "holds no config.toml"),
    "from no recording": ((*TRAIN, "--from", "file"), "--from file: "),
    "evaluate a file": (("evaluate", "file"), "file: "),
    "evaluate an absurd seed": (("evaluate", "run", "--seed", str(10**30)), "--seed"),
    "plot a file": (("plot", "file"), "file"),
    "plot to a folder": (("plot", "run", "-o", "sets"), "-o sets: Is a directory"),
    "plot no kind": (("plot", "run", "-o", "x.foo"), "--output x.foo: "),
    "graph of a file": (("graph", "file"), "file: holds no metrics.jsonl"),
    "graph without a pause": (("graph", "run", "--interval", "nan"), "--interval"),
    "a job over a run": (("jobs", "start", "--name", "run", "--runs", ".", "x"), "--name run: run is there"),
    "a job outside of its folder": (("jobs", "start", "--name", "../x", "x"), "--name '../x': is no name"),
    "jobs of one that is none": (("jobs", "list", "run"), "unexpected extra argument"),
    "what no job said": (("jobs", "logs", "run", "--runs", "."), "run: is no job"),
    "stop no job": (("jobs", "stop", "absent"), "absent: is no job"),
    "record into the run": (("record", "run", "--out", "used"), "--out used: "),
    "record to a file": (("record", "run", "--out", "file"), "--out file: "),
    "export to a folder": (("policy", "export", "run", "-o", "sets"), "-o sets: Is a directory"),
    "an absurd version": (("policy", "promote", "run", "9" * 23, "--reason", "x"), "VERSION"),
    "a version in another alphabet": (
        ("policy", "traffic", "run", "--pin", "a=٣", "--reason", "x"), "--pin 'a=٣'",
    ),
    "a client with two versions": (
        ("policy", "traffic", "run", "--pin", "a=1", "--pin", "a=2", "--reason", "x"), "--pin a=2: --pin a=1",
    ),
    "a client that is tied and untied": (
        ("policy", "traffic", "run", "--pin", "a=1", "--unpin", "a", "--reason", "x"), "--pin a=1: --unpin a",
    ),
    "a share that is no number": (
        ("policy", "traffic", "run", "--canary-share", "nan", "--reason", "x"), "--canary-share",
    ),
    "a policy of a file": (("policy", "list", "file"), "file"),
    "a registry that is none": (("policy", "list", "sqlite:///file"), "file is not a database; name another"),
    "a registry that is none, to write": (
        ("policy", "promote", "sqlite:///file", "1", "--reason", "x"), "file is not a database; name another",
    ),
    "show what is not there": (("policy", "show", "run", "99"), "version=99"),
    "roll back what is not there": (
        ("policy", "rollback", "run", "--version", "99", "--reason", "x"), "version=99",
    ),
    "retire what is not there": (("policy", "retire", "run", "99", "--reason", "x"), "version=99"),
    "pause a file": (("control", "pause", "file"), "file: no folder of a run"),
    "let nothing go on": (("control", "resume", "absent"), "absent: no folder of a run"),
    "stop at no port": (("control", "stop", "h:99999"), "h:99999: no folder of a run"),
    "checkpoint of an empty name": (
        ("control", "checkpoint", "run", "--name", ""),
        "Invalid value for '--name': it is empty",
    ),
    "restore of a run without a broker": (("control", "restore", "run", "x"), "run: names no broker"),
    "an absurd flush": (("control", "flush", "127.0.0.1:1", "--min-steps", str(10**30)), "--min-steps"),
    "an injector that is not there": (("inject", "--explain", "--folder", "absent"), "absent: is no folder"),
    "a switch of no injector": (("inject", "--switch", "on", "--folder", "absent"), "absent: is no folder"),
    "a switch to neither": (("inject", "--switch", "maybe"), "--switch maybe: say on or off"),
    "thoughts of no run": (("thoughts", "check", "absent"), "absent: holds no config.toml, so no run"),
    "study of no recipe": (("thoughts", "study", "absent", "--out", "o"), "absent: cannot be read"),
    "traces that are not there": (("traces", "check", "absent"), "absent: cannot be read"),
    "traces of a file": (("traces", "import", "file", "--out", "o"), "file: holds no whole episode"),
    "traces for a policy of a file": (
        ("traces", "evaluate", "file", "--policy", "run"), "file: holds no whole episode",
    ),
    "a registry with a password": (("policy", "list", "postgresql://u:s3cret@h/d"), "holds a secret"),
    "audit a file": (("audit", "file"), "file"),
    "status of a file": (("status", "file"), "file"),
    "status without a pause": (("status", "run", "--interval", "nan"), "--interval"),
    "ui of a file": (("ui", "file"), "file"),
    "certificates in a file": (("certificates", "file", "--run", "r"), "file: "),
    "certificates of the past": (("certificates", "c", "--run", "r", "--days", "-5"), "--days -5"),
    "certificates with no users": (
        ("certificates", "c", "--run", "r", "--redis-users", "absent"), "--redis-users absent: ",
    ),
    "an unknown device": (
        ("rlhf", "reward", "score", "http://127.0.0.1:9/x", "rows.jsonl", "--device", "banana"), "--device",
    ),
    "scores over what is read": (
        ("rlhf", "reward", "score", "http://127.0.0.1:9/x", "rows.jsonl", "-o", "rows.jsonl"),
        "--output rows.jsonl: is the file that is read",
    ),
    "feedback from nowhere": (("rlhf", "feedback", "export", "no.jsonl"), "feedback=no.jsonl: no such file"),
    "feedback over what is read": (
        ("rlhf", "feedback", "export", "rows.jsonl", "-o", "rows.jsonl"),
        "--output rows.jsonl: is the file that is read",
    ),
    "generate from a file": (("rlhf", "generate", "file", "--prompt", "a"), "file: "),
    "doctor of a run": (("doctor", "run"), "unexpected extra argument"),
    "a reason that is no text": (
        ("control", "pause", "127.0.0.1:1", "--reason", "\udcff"), "--reason '\\udcff': no text",
    ),
    "tables below a file": ((*MIGRATE, "--state", "file"), "--state file: "),
    "tables of what is no database": (
        (*MIGRATE, "--database", "sqlite:///file", "--registry", "sqlite:///r"), "file is not a database",
    ),
    "tables of no registry": ((*MIGRATE, "--registry", "banana"), "registry url: not a URL"),
    "a database with a password that it cannot have": (
        (*MIGRATE, "--database", "sqlite:///x?password=s3cret"), "SQLite asks for none",
    ),
    "keys in a folder": (("gateway", "keys", "sets"), "--keys sets: Is a directory"),
    "keys over a file": (("gateway", "keys", "file"), "--keys file: "),
    "a person of another alphabet": ((*PERSON, "Ünï"), "name: use 1 to 128 of a-z"),
    "a person without a password": ((*PERSON, "ann"), "password: must have 12"),
    "a person whose password is not there": (
        (*PERSON, "ann", "--password-file", "absent"), "--password-file absent: ",
    ),
    "a member of no gateway": (("gateway", "user", "grant", "ann", "--project", "p"), "no such file: start"),
    "a member of no rank": (
        ("gateway", "user", "grant", "ann", "--project", "p", "--role", "king"), "'king' is not one of",
    ),
    "a password of no gateway": (("gateway", "user", "password", "ann"), "no such file: start"),
    "a person to disable who is absent": (
        ("gateway", "user", "disable", "ann", "--database", "banana"), "--database: accounts database url",
    ),
    "a token of no gateway": (("gateway", "token", "add", "t", "--project", "p"), "no such file: start"),
    "a token for no day": (("gateway", "token", "add", "t", "--project", "p", "--days", "0"), "--days"),
    "no token to revoke": (
        ("gateway", "token", "revoke", "t", "--project", "p", "--state", "file"), "no such file: start",
    ),
}  # fmt: skip


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder by name; None for a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


@pytest.mark.promise("secret-given-documented-road")
@pytest.mark.parametrize(("words", "told"), COMMANDS.values(), ids=COMMANDS.keys())
def test_a_mistake_is_explained_and_changes_nothing(words: tuple[str, ...], told: str, here: Path) -> None:
    before = snapshot(here)
    reply = CliRunner().invoke(app, words)
    assert reply.exception is None or isinstance(reply.exception, SystemExit), reply.exception
    assert reply.exit_code == 2, reply.stderr
    assert told in reply.stderr
    assert "Traceback" not in reply.stderr
    assert "s3cret" not in reply.output
    assert reply.stdout == ""
    assert snapshot(here) == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_explained(here: Path) -> None:
    reply = CliRunner().invoke(app, ("plot", "run", "-o", "/dev/full"))
    assert reply.exit_code == 2
    assert "-o /dev/full: No space left on device; make room" in reply.stderr


VALUES: Final[tuple[Any, ...]] = (
    float("inf"), float("-inf"), float("nan"), 1e300, -1e300, 10**30, -(10**30), 0, -1, 1, 0.5, True,
    "", "x", "٣", "Ünï", "\0", "a\x7fb", "\udcff", "redis://u:s3cret@h", date(1979, 5, 27),
    [], [1], ["x"], {}, {"x": 1}, [[]], {"x": date(1979, 5, 27)},
)  # fmt: skip
"""What somebody might write behind any key."""


def keys(section: type[Section], before: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from keys(kind, f"{before}{name}.")
        else:
            yield f"{before}{name}"


def nested(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return dict(value)


@pytest.mark.promise("value-behind-setting-refused")
@pytest.mark.parametrize("key", list(keys(Settings)))
def test_a_setting_is_refused_by_name_or_can_be_written_and_shown(key: str) -> None:
    for value in VALUES:
        try:
            settings = load([nested(key, value)])
        except ConfigurationError as error:
            assert str(error).startswith(key.partition(".")[0]), (value, error)
            assert "s3cret" not in str(error)
            continue
        written = dump(settings)
        assert "s3cret" not in written
        read = load([tomllib.loads(written)])
        secret = settings.security.redis_password
        assert read == settings or secret is not None, value
        json.dumps(settings.model_dump(mode="json"), allow_nan=False)


def test_a_pipe_as_output_is_written_to_and_not_replaced(here: Path) -> None:
    reply = CliRunner().invoke(app, ("plot", "run", "-o", os.devnull))
    assert reply.exit_code == 0, reply.output
    assert Path(os.devnull).is_char_device()
