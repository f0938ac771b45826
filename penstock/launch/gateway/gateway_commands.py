"""`penstock gateway`: serve HTTP with accounts, and what its operator does to people and tokens.

The commands `user` and `token` work on the accounts database itself, whether a gateway serves or not. Who
can read it and the keys is the operator; the audit names them so.
"""

from enum import StrEnum
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from penstock.config.configuration_error import how_to_install
from penstock.launch.gateway.site_commands import (
    FurtherAgents,
    HostNames,
    Origins,
    Proxies,
    WithSites,
    checked_address,
    named_agents,
)
from penstock.runtime.exit import EXIT_USAGE
from penstock.runtime.foreground import (
    Assignments,
    ConfigFile,
    EndpointFile,
    Insecure,
    assigned,
    finish,
    in_foreground,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.config.settings import Settings
    from penstock.gateway.application import Service
    from penstock.gateway.process import Places, Work
    from penstock.gateway.sites.site import RunBehind
    from penstock.runtime.lifecycle import Lifecycle

gateway_commands = typer.Typer(cls=WithSites, help="Serve people over HTTP: accounts, projects, feedback.")
user_commands = typer.Typer(help="People who may sign in.", no_args_is_help=True)
token_commands = typer.Typer(help="API tokens, by which programs act in a project.", no_args_is_help=True)
gateway_commands.add_typer(user_commands, name="user")
gateway_commands.add_typer(token_commands, name="token")

OPERATOR = "operator"

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
RoleName = Annotated[str, typer.Option("--role", help="viewer, editor or owner.")]
PasswordFile = Annotated[
    Path | None,
    typer.Option("--password-file", help="File with the password; default: asked for, or read from stdin."),
]
_STATE = Path("gateway-state")


class RunnerName(StrEnum):
    """Names who runs trainings."""

    LOCAL = "local"
    KUBERNETES = "kubernetes"


@gateway_commands.callback(invoke_without_command=True)
def gateway(
    context: typer.Context,
    listen: Annotated[str, typer.Option(metavar="ADDRESS", help="HOST:PORT.")] = "127.0.0.1:8000",
    state: State = _STATE,
    database: DatabaseUrl = "",
    registry: RegistryUrl = "",
    keys: KeysFile = None,
    hosts: HostNames = None,
    origins: Origins = None,
    proxies: Proxies = None,
    templates: Annotated[
        Path | None,
        typer.Option(
            "--templates", help="Folder of templates: people may have trainings run here that they describe."
        ),
    ] = None,
    runner: Annotated[
        RunnerName,
        typer.Option("--runner", help="Where trainings run: as processes here, or as Jobs of a cluster."),
    ] = RunnerName.LOCAL,
    cluster: Annotated[
        Path | None,
        typer.Option("--cluster", metavar="FILE", help="Describes it, for --runner kubernetes."),
    ] = None,
    models: Annotated[
        Path | None,
        typer.Option("--models", help="Folder below which models that were trained are exported."),
    ] = None,
    jobs_at_once: Annotated[
        int, typer.Option("--jobs-at-once", min=1, help="Trainings at the same time; others queue.")
    ] = 1,
    quotas: Annotated[
        list[str] | None,
        typer.Option(
            "--quota", metavar="NAME=NUMBER", help="Most that a project may have stored; may be repeated."
        ),
    ] = None,
    oidc: Annotated[
        Path | None,
        typer.Option("--oidc", metavar="FILE", help="People may sign in at the provider that it names."),
    ] = None,
    config: ConfigFile = None,
    assignments: Assignments = None,
    endpoints: EndpointFile = None,
    insecure: Insecure = False,
) -> None:
    """Serve people over HTTP. With a command behind it: look after people and tokens."""
    _check_extra()
    if context.invoked_subcommand is not None:
        _refuse_options_before(context, context.invoked_subcommand)
        return

    def body(lifecycle: "Lifecycle", settings: "Settings") -> int:
        from penstock.gateway.accounts.audit import Quotas
        from penstock.gateway.accounts.oidc import read_provider
        from penstock.gateway.frame.envelope import Doors
        from penstock.gateway.process import Places, main

        names, pages = frozenset(hosts or ()), frozenset(origins or ())
        doors = Doors(hosts=names, origins=pages, proxies=tuple(proxies or ()))
        places = Places(state=state, database=database, registry=registry, keys=keys, models=models)
        _check_runner(runner, cluster, registry)
        return main(
            lifecycle,
            settings,
            places=places,
            doors=doors,
            listen=listen,
            insecure=insecure,
            work=None
            if templates is None
            else partial(_work, state, templates, jobs_at_once, cluster, registry),
            oidc=None if oidc is None else read_provider(oidc),
            quotas=Quotas.of(quotas or ()),
        )

    in_foreground("gateway", body, config, list(assigned(assignments, insecure=insecure)), endpoints)


@gateway_commands.command("migrate")
def migrate(state: State = _STATE, database: DatabaseUrl = "", registry: RegistryUrl = "") -> None:
    """Make the tables of both databases where there are none, and end."""

    def body() -> int:
        from penstock.launch.gateway.people import migrate as run

        return run(_places(state, database, None, registry))

    finish(body)


@gateway_commands.command("keys")
def make_keys(file: Annotated[Path, typer.Argument(help="Written once, for its owner alone.")]) -> None:
    """Write a file of signing keys for several gateways to share."""

    def body() -> int:
        from penstock.launch.gateway.people import make_keys as run

        return run(file)

    finish(body)


@gateway_commands.command("text")
def text(
    server: Annotated[
        str, typer.Option("--server", metavar="ADDRESS", help="Server of text: HOST:PORT or unix:/path.")
    ] = "",
    agents: FurtherAgents = None,
    listen: Annotated[
        str, typer.Option(metavar="ADDRESS", help="HOST:PORT of this machine.")
    ] = "127.0.0.1:8765",
    config: ConfigFile = None,
    assignments: Assignments = None,
    endpoints: EndpointFile = None,
    insecure: Insecure = False,
) -> None:
    """Serve agents the API that they know (OpenAI's chat completions), over one server of text or several."""

    def body(lifecycle: "Lifecycle", settings: "Settings") -> int:
        from penstock.gateway.text.chat_routes import main

        return main(lifecycle, settings, agents=_text_servers(server, agents or (), settings), listen=listen)

    in_foreground("gateway", body, config, list(assigned(assignments, insecure=insecure)), endpoints)


@user_commands.command("add")
def add_user(
    name: Name,
    project: Project,
    role: RoleName = "owner",
    password_file: PasswordFile = None,
    state: State = _STATE,
    database: DatabaseUrl = "",
    keys: KeysFile = None,
) -> None:
    """Add a person, as a member of a project."""

    def body() -> int:
        from penstock.launch.gateway.people import add

        return add(_places(state, database, keys), name, project, role, password_file)

    finish(body)


@user_commands.command("grant")
def grant(
    name: Name,
    project: Project,
    role: RoleName = "editor",
    state: State = _STATE,
    database: DatabaseUrl = "",
    keys: KeysFile = None,
) -> None:
    """Make a person who has an account a member of another project, or change their role."""

    def body() -> int:
        from penstock.launch.gateway.people import grant as run

        return run(_places(state, database, keys), name, project, role)

    finish(body)


@user_commands.command("password")
def reset_password(
    name: Name,
    password_file: PasswordFile = None,
    state: State = _STATE,
    database: DatabaseUrl = "",
    keys: KeysFile = None,
) -> None:
    """Set a person's password; all their sessions end."""

    def body() -> int:
        from penstock.launch.gateway.people import reset_password as run

        return run(_places(state, database, keys), name, password_file)

    finish(body)


@user_commands.command("disable")
def disable(name: Name, state: State = _STATE, database: DatabaseUrl = "", keys: KeysFile = None) -> None:
    """Let a person sign in no more; their sessions end, and the tokens, links and invitations they made."""

    def body() -> int:
        from penstock.launch.gateway.people import disable as run

        return run(_places(state, database, keys), name)

    finish(body)


@token_commands.command("add")
def add_token(
    name: Annotated[str, typer.Argument(help="What the token is for.")],
    project: Project,
    role: Annotated[str, typer.Option("--role", help="viewer or editor.")] = "editor",
    days: Annotated[int | None, typer.Option(min=1, max=3650, help="Default: until it is revoked.")] = None,
    state: State = _STATE,
    database: DatabaseUrl = "",
    keys: KeysFile = None,
) -> None:
    """Print a new token, this once; a netrc file may hold it as the password."""

    def body() -> int:
        from penstock.launch.gateway.people import add_token as run

        return run(_places(state, database, keys), name, project, role, days)

    finish(body)


@token_commands.command("revoke")
def revoke_token(
    token: Annotated[str, typer.Argument(help="Id of the token.")],
    project: Project,
    state: State = _STATE,
    database: DatabaseUrl = "",
    keys: KeysFile = None,
) -> None:
    """Refuse a token from now on."""

    def body() -> int:
        from penstock.launch.gateway.people import revoke_token as run

        return run(_places(state, database, keys), token, project)

    finish(body)


def _check_extra() -> None:
    """End with what to install where a package of the extra `gateway` is absent."""
    absent = [name for name in ("argon2", "fastapi", "jwt", "uvicorn") if find_spec(name) is None]
    if absent:
        typer.echo(f"no gateway without {', '.join(absent)}; {how_to_install('gateway')}", err=True)
        raise typer.Exit(EXIT_USAGE)


def _refuse_options_before(context: typer.Context, command: str) -> None:
    """End where an option stands before a command: the command has its own, and would work elsewhere."""
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        if source is not None and source.name == "COMMANDLINE":
            option = parameter.opts[0]
            typer.echo(
                f"{option}: belongs behind the command: penstock gateway {command} … {option} …", err=True
            )
            raise typer.Exit(EXIT_USAGE)


def _text_servers(server: str, agents: "Sequence[str]", settings: "Settings") -> "dict[str, RunBehind]":
    """Return the runs that are answered for by name, the first one as FIRST; raises ConfigurationError."""
    from penstock.config.configuration_error import ConfigurationError
    from penstock.gateway.text.agents import FIRST
    from penstock.launch.gateway.run_behind import NamedServer

    if not server and not agents:
        raise ConfigurationError("--server: name the server of text, or several with --agent NAME=…")
    others = named_agents(agents, settings)
    if not server:
        return others
    return {FIRST: NamedServer(checked_address("--server", server), "", settings), **others}


def _check_runner(runner: RunnerName, cluster: Path | None, registry: str) -> None:
    """Raise ConfigurationError where jobs shall run on a cluster, and what that takes is not said."""
    from penstock.config.configuration_error import ConfigurationError

    if (runner is RunnerName.KUBERNETES) is (cluster is None):
        raise ConfigurationError(
            f"--runner {runner} --cluster {cluster}: --runner kubernetes and --cluster FILE come together"
        )
    if runner is RunnerName.KUBERNETES and not registry.startswith("postgresql://"):
        raise ConfigurationError(
            f"--registry {registry!r}: trainings on a cluster register their versions in it from their "
            "pods; name a PostgreSQL"
        )


def _work(state: Path, templates: Path, at_once: int, cluster: Path | None, registry: str) -> "Work":
    """Return how jobs are run; raises ConfigurationError.

    cluster: file of where; None: as processes here. registry: URL of theirs; "": a file in `state`.
    """
    from penstock.config.configuration_error import ConfigurationError
    from penstock.gateway.process import Work
    from penstock.launch.gateway.job_templates import check_templates
    from penstock.launch.gateway.kubernetes_runner import KubernetesRunner, read_cluster
    from penstock.launch.gateway.local_runner import LocalRunner
    from penstock.launch.gateway.run_steering import PodSteering, RunSteering

    if not templates.is_dir():
        raise ConfigurationError(f"--templates {templates}: no folder")
    services = _services()
    kinds = {kind for one in services for kind in one.kinds}
    check_templates(templates, kinds)  # before the folder of the jobs is made
    try:
        if cluster is None:
            local = LocalRunner(state / "jobs", templates)
            url = _places(state, "", None, registry).registry_url()
            return Work(
                runner=local, steering=RunSteering(local.run_folder, url), at_once=at_once, services=services
            )
        pods = KubernetesRunner(state / "jobs", templates, read_cluster(cluster))
    except OSError as error:
        raise ConfigurationError(f"--state {state}: {error.strerror}") from error
    return Work(
        runner=pods, steering=PodSteering(pods.run_folder, registry), at_once=at_once, services=services
    )


def _services() -> "list[Service]":
    """Return what the installed workloads add to a gateway."""
    from penstock.config.workload import find, installed, load

    paths = [workload.http for workload in map(find, installed()) if workload.http]
    return [cast("Service", load(path)()) for path in paths]


def _places(state: Path, database: str, keys: Path | None, registry: str = "") -> "Places":
    from penstock.gateway.process import Places

    return Places(state=state, database=database, keys=keys, registry=registry)
