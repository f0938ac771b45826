"""`penstock gateway user` and `token`: commands of the operator of a gateway about people and tokens.

They change the database of the accounts, whether a gateway serves or not. Everybody who can read it and the
keys acts as the operator, and is called so in the audit.
"""

import getpass
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from penstock.config.configuration_error import ConfigurationError
from penstock.runtime.exit import EXIT_OK, Fatal
from penstock.runtime.foreground import command

if TYPE_CHECKING:
    from datetime import datetime

    from sqlalchemy.orm import Session

    from penstock.gateway.accounts.accounts import Accounts
    from penstock.gateway.store.tables import ApiTokenRow

State = Annotated[
    Path, typer.Option("--state", help="Folder of keys and SQLite files that have no other place.")
]
DatabaseUrl = Annotated[
    str,
    typer.Option(
        "--database", metavar="URL", help="Accounts: sqlite:///FILE or postgresql://USER@HOST/DATABASE."
    ),
]
RegistryUrl = Annotated[
    str, typer.Option("--registry", metavar="URL", help="Registry of versions and ratings, as a run's.")
]
KeysFile = Annotated[
    Path | None, typer.Option("--keys", help="File of the signing keys, shared by all gateways; made once.")
]
Name = Annotated[str, typer.Argument(help="Name by which a person signs in.")]
Project = Annotated[str, typer.Option("--project", help="Project; its first owner adds it.")]
RoleName = Annotated[Literal["viewer", "editor", "owner"], typer.Option("--role")]
PasswordFile = Annotated[
    Path | None,
    typer.Option("--password-file", help="File with the password; default: asked for, or read from stdin."),
]
STATE: Final = Path("gateway-state")
OPERATOR: Final = "operator"


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountsPlace:
    """Options of where accounts and their keys are."""

    state: State = STATE
    database: DatabaseUrl = ""
    keys: KeysFile = None

    @contextmanager
    def opened(self, *, make: bool = False) -> "Iterator[Accounts]":
        """Open the accounts. make: make them where there are none; default: refuse such a place."""
        from penstock.config.run_folder import keep_private
        from penstock.gateway.process import Places, open_accounts

        keep_private()  # passwords can be tried against a file of accounts
        accounts, database = open_accounts(
            Places(state=self.state, database=self.database, keys=self.keys), make=make
        )
        try:
            with _refusals():
                yield accounts
        finally:
            database.close()


user_commands = typer.Typer(help="People who may sign in.", no_args_is_help=True)
token_commands = typer.Typer(help="API tokens, by which programs act in a project.", no_args_is_help=True)


@command(user_commands, "add")
def add_user(
    places: AccountsPlace,
    name: Name,
    project: Project,
    role: RoleName = "owner",
    password_file: PasswordFile = None,
) -> int:
    """Add a person, as a member of a project."""
    from penstock.gateway.accounts import projects, users
    from penstock.gateway.store.tables import Role

    kind = Role(role)
    with _refusals():
        account = users.check_name(name)
        projects.check_project(project)
        password = _password(password_file)
        users.check_password(password, name=account)
    # Tables and keys are made, where there are none, for an owner only, who may add a project.
    with places.opened(make=kind is Role.OWNER) as accounts:
        id_ = accounts.add_user(name, password, project=project, role=kind, by=OPERATOR)
    sys.stdout.write(f"user/{id_}\n")
    return EXIT_OK


@command(user_commands)
def grant(places: AccountsPlace, name: Name, project: Project, role: RoleName = "editor") -> int:
    """Make a person who has an account a member of another project, or change their role."""
    from penstock.gateway.store.tables import Role

    with places.opened() as accounts:
        accounts.add_member(name, project=project, role=Role(role), by=OPERATOR)
    return EXIT_OK


@command(user_commands, "password")
def reset_password(places: AccountsPlace, name: Name, password_file: PasswordFile = None) -> int:
    """Set a person's password; all their sessions end."""
    from penstock.gateway.accounts import users

    with places.opened() as accounts:
        encoded = users.hash_password(_password(password_file), name=name.lower())
        accounts.run(
            lambda session, now: users.change_password(
                session, now, users.known(session, name), password=encoded, by=OPERATOR
            )
        )
    return EXIT_OK


@command(user_commands)
def disable(places: AccountsPlace, name: Name) -> int:
    """Let a person sign in no more; their sessions end, and the tokens, links and invitations they made."""
    from penstock.gateway.accounts import users

    with places.opened() as accounts:
        accounts.run(
            lambda session, now: users.disable(session, now, users.known(session, name), by=OPERATOR)
        )
    return EXIT_OK


@command(token_commands, "add")
def add_token(
    places: AccountsPlace,
    name: Annotated[str, typer.Argument(help="What the token is for.")],
    project: Project,
    role: Annotated[Literal["viewer", "editor"], typer.Option("--role")] = "editor",
    days: Annotated[int | None, typer.Option(min=1, max=3650, help="Default: until it is revoked.")] = None,
) -> int:
    """Print a new token, this once; a netrc file may hold it as the password."""
    from penstock.gateway.accounts import api_tokens, projects
    from penstock.gateway.store.tables import Role

    with places.opened() as accounts:
        projects.check_project(project)

        def work(session: "Session", now: "datetime") -> "tuple[ApiTokenRow, str]":
            projects.check_known(session, project)
            return api_tokens.add(
                session, now, project=project, name=name, role=Role(role), days=days, by=OPERATOR
            )

        made, secret = accounts.run(work)
    sys.stderr.write(f"token/{made.id}\n")
    sys.stdout.write(f"{secret}\n")
    return EXIT_OK


@command(token_commands, "revoke")
def revoke_token(
    places: AccountsPlace, token: Annotated[str, typer.Argument(help="Id of the token.")], project: Project
) -> int:
    """Refuse a token from now on."""
    from penstock.gateway.accounts import api_tokens

    with places.opened() as accounts:
        accounts.run(
            lambda session, now: api_tokens.revoke(session, now, project=project, token=token, by=OPERATOR)
        )
    return EXIT_OK


@contextmanager
def _refusals() -> Iterator[None]:
    """Raise refusals of the accounts as errors of a command."""
    from penstock.gateway.accounts.principal import AccountError, BadInput
    from penstock.registry.records import RegistryError

    try:
        yield
    except BadInput as error:
        raise ConfigurationError(f"{error.field}: {error}") from error
    except (AccountError, RegistryError) as error:
        raise Fatal(str(error)) from error


def _password(file: Path | None) -> str:
    """Return a password from a file, from a prompt on a terminal, or from the first line of stdin."""
    try:
        if file is not None:
            return (file.read_text("utf-8").splitlines() or [""])[0]
        return getpass.getpass() if sys.stdin.isatty() else sys.stdin.readline().rstrip("\n")
    except UnicodeDecodeError as error:
        where = "stdin" if file is None else f"--password-file {file}"
        raise ConfigurationError(f"{where}: not UTF-8; save it as UTF-8") from error
    except OSError as error:
        raise ConfigurationError(f"--password-file {file}: no password to read: {error}") from error
