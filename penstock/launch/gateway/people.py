"""What the operator of a gateway does on its databases: tables and keys, people and tokens."""

import getpass
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Final

from sqlalchemy.orm import Session

from penstock.config.configuration_error import ConfigurationError
from penstock.config.run_folder import keep_private
from penstock.gateway.accounts import api_tokens, projects, users
from penstock.gateway.accounts.accounts import Accounts
from penstock.gateway.accounts.principal import AccountError, BadInput
from penstock.gateway.accounts.sessions import make_keys as write_keys
from penstock.gateway.accounts.sessions import read_keys
from penstock.gateway.accounts.users import check_password, hash_password
from penstock.gateway.process import Places, open_accounts, open_accounts_database, open_registry
from penstock.gateway.store.tables import ApiTokenRow, Role
from penstock.registry.records import RegistryError
from penstock.runtime.exit import EXIT_OK, Fatal


def migrate(places: Places) -> int:
    """Make the tables of both databases; returns the exit code. Raises ConfigurationError, Fatal."""
    keep_private()
    if not (places.database and places.registry):
        places.state.mkdir(parents=True, exist_ok=True, mode=0o700)
    for opened in (open_accounts_database(places), open_registry(places)):
        opened.close()
    sys.stdout.write("the tables are up to date\n")
    return EXIT_OK


def make_keys(file: Path) -> int:
    """Write keys, unless the file is there; returns the exit code. Raises ConfigurationError, OSError."""
    try:
        write_keys(file)
    except OSError as error:  # it names a file beside this one, which becomes this one
        raise OSError(error.errno, error.strerror, str(file)) from error
    read_keys(file)
    return EXIT_OK


OPERATOR: Final = "operator"


def add(places: Places, name: str, project: str, role: str, password_file: Path | None) -> int:
    """Add a person; returns the exit code. Raises ConfigurationError, Fatal.

    Tables and keys are made where there are none, for somebody who may add a project: its owner.
    """
    kind = _role(role)
    with _told():
        account = users.check_name(name)
        projects.check_project(project)
        password = _password(password_file)
        check_password(password, name=account)
    with _opened(places, make=kind is Role.OWNER) as accounts:
        id_ = accounts.add_user(name, password, project=project, role=kind, by=OPERATOR)
    sys.stdout.write(f"user/{id_}\n")
    return EXIT_OK


def grant(places: Places, name: str, project: str, role: str) -> int:
    """Make a person a member; returns the exit code. Raises ConfigurationError, Fatal."""
    kind = _role(role)
    with _opened(places) as accounts:
        accounts.add_member(name, project=project, role=kind, by=OPERATOR)
    return EXIT_OK


def reset_password(places: Places, name: str, password_file: Path | None) -> int:
    """Set a password; returns the exit code. Raises ConfigurationError, Fatal."""
    with _opened(places) as accounts:
        encoded = hash_password(_password(password_file), name=name.lower())
        accounts.run(
            lambda session, now: users.change_password(
                session, now, users.known(session, name), password=encoded, by=OPERATOR
            )
        )
    return EXIT_OK


def disable(places: Places, name: str) -> int:
    """Disable an account; returns the exit code. Raises ConfigurationError, Fatal."""
    with _opened(places) as accounts:
        accounts.run(
            lambda session, now: users.disable(session, now, users.known(session, name), by=OPERATOR)
        )
    return EXIT_OK


def add_token(places: Places, name: str, project: str, role: str, days: int | None) -> int:
    """Print a new token; returns the exit code. Raises ConfigurationError, Fatal."""
    kind = _role(role)
    with _opened(places) as accounts:
        projects.check_project(project)

        def work(session: Session, now: datetime) -> tuple[ApiTokenRow, str]:
            projects.check_known(session, project)
            return api_tokens.add(session, now, project=project, name=name, role=kind, days=days, by=OPERATOR)

        made, secret = accounts.run(work)
    sys.stderr.write(f"token/{made.id}\n")
    sys.stdout.write(f"{secret}\n")
    return EXIT_OK


def revoke_token(places: Places, token: str, project: str) -> int:
    """Revoke a token; returns the exit code. Raises ConfigurationError, Fatal."""
    with _opened(places) as accounts:
        accounts.run(
            lambda session, now: api_tokens.revoke(session, now, project=project, token=token, by=OPERATOR)
        )
    return EXIT_OK


@contextmanager
def _opened(places: Places, *, make: bool = False) -> Iterator[Accounts]:
    """Open the accounts. make: where there are none; else a place that holds none is refused."""
    keep_private()  # a file of accounts that is made here holds what passwords can be tried against
    accounts, database = open_accounts(places, make=make)
    try:
        with _told():
            yield accounts
    finally:
        database.close()


@contextmanager
def _told() -> Iterator[None]:
    """Turn what the accounts refuse into what a command says."""
    try:
        yield
    except BadInput as error:
        raise ConfigurationError(f"{error.field}: {error}") from error
    except (AccountError, RegistryError) as error:
        raise Fatal(str(error)) from error


def _role(text: str) -> Role:
    try:
        return Role(text)
    except ValueError as error:
        raise ConfigurationError(f"--role {text!r}: use viewer, editor or owner") from error


def _password(file: Path | None) -> str:
    """Return a password that no command line shows: of a file, asked for, or the first line of stdin."""
    try:
        if file is not None:
            return (file.read_text("utf-8").splitlines() or [""])[0]
        return getpass.getpass() if sys.stdin.isatty() else sys.stdin.readline().rstrip("\n")
    except UnicodeDecodeError as error:
        where = "stdin" if file is None else f"--password-file {file}"
        raise ConfigurationError(f"{where}: not UTF-8; save it as UTF-8") from error
    except OSError as error:
        raise ConfigurationError(f"--password-file {file}: no password to read: {error}") from error
