"""`penstock gateway`: where its extra is absent, and what the operator's commands keep to themselves."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from penstock.launch.cli.app import app
from penstock.launch.cli.plugin_commands import encoding_mistake


@pytest.mark.parametrize("words", [("gateway",), ("gateway", "user", "add", "ann", "--project", "p")])
def test_without_its_extra_there_is_no_gateway(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jwt", None)
    reply = CliRunner().invoke(app, words)
    assert reply.exit_code == 2
    assert "no gateway without " in reply.stderr
    assert "jwt" in reply.stderr
    assert "penstock-rl[gateway]" in reply.stderr


@pytest.fixture
def public_umask() -> Iterator[None]:
    """A process whose files all users may read; the umask of before comes back."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("public_umask")
@pytest.mark.parametrize("words", [("user", "add", "ann", "--project", "p"), ("migrate",)])
def test_databases_are_of_their_user_alone(words: tuple[str, ...], tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o755)
    reply = CliRunner().invoke(
        app, ("gateway", *words, "--state", str(state)), input="correct horse battery staple\n"
    )
    assert reply.exit_code == 0, reply.output
    modes = {file.name: file.stat().st_mode & 0o777 for file in state.iterdir()}
    assert "accounts.sqlite" in modes
    assert set(modes.values()) == {0o600}, modes


@pytest.mark.parametrize(
    ("held", "said"), [(b"", "12 to 256"), ("geheime-Losung-ß".encode("latin-1"), "not UTF-8")]
)
def test_a_password_file_that_holds_none_is_named_and_not_shown(
    held: bytes, said: str, tmp_path: Path
) -> None:
    file = tmp_path / "password"
    file.write_bytes(held)
    words = ("user", "add", "ann", "--project", "p", "--password-file", str(file))
    reply = CliRunner().invoke(app, ("gateway", *words, "--state", str(tmp_path / "state")))
    assert reply.exit_code == 2
    assert said in reply.stderr
    assert "geheime" not in reply.output
    assert "index" not in reply.stderr


def test_a_token_whose_end_no_calendar_holds_is_refused(tmp_path: Path) -> None:
    words = ("token", "add", "t", "--project", "p", "--days", "36500000", "--state", str(tmp_path))
    reply = CliRunner().invoke(app, ("gateway", *words))
    assert reply.exit_code == 2
    assert "--days" in reply.stderr


@pytest.mark.parametrize("command", [("user", "add", "ada", "--project", "alpha"), ("migrate",)])
@pytest.mark.parametrize("option", ["--state", "--database", "--registry", "--keys"])
def test_an_option_before_the_command_is_refused(
    option: str, command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("gateway", option, str(tmp_path / "named"), *command)
    reply = CliRunner().invoke(app, words, input="correct horse battery staple\n")
    assert reply.exit_code == 2
    assert f"{option}: belongs behind the command: penstock gateway {command[0]}" in reply.stderr
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_not_text_is_not_repeated() -> None:
    told = encoding_mistake(UnicodeDecodeError("utf-8", b"geheim\xff", 6, 7, "invalid start byte"))
    assert "geheim" not in told
    assert "byte 6" in told


def call(state: Path, *words: str) -> Result:
    """`penstock gateway …` on the accounts of a folder."""
    typed = "correct horse battery staple\n"
    return CliRunner().invoke(app, ("gateway", *words, "--state", str(state)), input=typed)


@pytest.mark.parametrize(
    "words",
    [
        ("token", "add", "t", "--project", "typo"),
        ("user", "grant", "eve", "--project", "typo", "--role", "editor"),
        ("user", "add", "bob", "--project", "typo", "--role", "viewer"),
    ],
)
def test_a_project_that_is_mistyped_is_not_made(words: tuple[str, ...], tmp_path: Path) -> None:
    assert call(tmp_path, "user", "add", "ada", "--project", "alpha").exit_code == 0
    assert call(tmp_path, "user", "add", "eve", "--project", "alpha", "--role", "viewer").exit_code == 0
    reply = call(tmp_path, *words)
    assert reply.exit_code == 2, reply.output
    assert "project: 'typo' is absent (there are: alpha)" in reply.stderr
    assert "penstock gateway user add NAME --project typo" in reply.stderr
    assert call(tmp_path, "token", "add", "t", "--project", "alpha").exit_code == 0
    assert call(tmp_path, "user", "grant", "ada", "--project", "beta", "--role", "owner").exit_code == 0
    assert call(tmp_path, *(word.replace("typo", "beta") for word in words)).exit_code == 0


def test_a_refused_person_leaves_no_accounts(tmp_path: Path) -> None:
    state = tmp_path / "state"
    assert call(state, "user", "add", "ann", "--project", "No Project").exit_code == 2
    assert not state.exists()
