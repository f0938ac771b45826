"""`penstock gateway`: serve HTTP with accounts, and its sites.

Each installed workload that has an API of its own (`Workload.site`) adds a command `penstock gateway NAME`.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from typer.core import TyperGroup

from penstock.config.configuration_error import ConfigurationError, how_to_install
from penstock.config.workload import find, installed, load
from penstock.launch.gateway.people import (
    STATE,
    DatabaseUrl,
    KeysFile,
    RegistryUrl,
    State,
    at_places,
    token_commands,
    user_commands,
)
from penstock.runtime.exit import EXIT_OK, EXIT_USAGE
from penstock.runtime.foreground import (
    Assignments,
    ConfigFile,
    EndpointFile,
    Insecure,
    finish,
    in_foreground,
)

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from penstock.config.settings import Settings
    from penstock.gateway.accounts.accounts import Accounts
    from penstock.gateway.application import Service
    from penstock.gateway.frame.envelope import Doors
    from penstock.gateway.process import Places, Work
    from penstock.gateway.sites.site import RunBehind, Site
    from penstock.runtime.lifecycle import Lifecycle

# ---- Options.

HostNames = Annotated[
    list[str] | None,
    typer.Option("--host", help="Name by which it is reached, beside loopback; may be repeated."),
]
Origins = Annotated[
    list[str] | None,
    typer.Option("--origin", metavar="URL", help="Pages of this origin may call; may be repeated."),
]
Proxies = Annotated[
    list[str] | None,
    typer.Option(
        "--proxy",
        metavar="ADDRESS",
        help="Proxy, or network of them, that says who calls (X-Forwarded-For); may be repeated.",
    ),
]
FurtherAgents = Annotated[
    list[str] | None,
    typer.Option(
        "--agent",
        metavar="NAME=DIR|ADDRESS",
        help="A further run, or the server of one, where several are answered for; may be repeated.",
    ),
]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class WithSites(TyperGroup):
    """The commands of the gateway, and behind them one for each site."""

    def list_commands(self, ctx: Any) -> list[str]:
        own = super().list_commands(ctx)
        return [*own, *(name for name in _sites() if name not in own)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = super().get_command(ctx, cmd_name)
        if found is not None or cmd_name not in _sites():
            return found
        outer = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        outer.callback()(lambda: None)  # so that typer makes a group, of one command
        outer.command(cmd_name)(_command(cmd_name))
        return typer.main.get_group(outer).get_command(ctx, cmd_name)


gateway_commands = typer.Typer(cls=WithSites, help="Serve people over HTTP: accounts, projects, feedback.")
gateway_commands.add_typer(user_commands, name="user")
gateway_commands.add_typer(token_commands, name="token")


class RunnerName(StrEnum):
    """Names who runs trainings."""

    LOCAL = "local"
    KUBERNETES = "kubernetes"


@gateway_commands.callback(invoke_without_command=True)
def gateway(
    context: typer.Context,
    listen: Annotated[str, typer.Option(metavar="ADDRESS", help="HOST:PORT.")] = "127.0.0.1:8000",
    state: State = STATE,
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
        from penstock.gateway.process import Places, main

        places = Places(state=state, database=database, registry=registry, keys=keys, models=models)
        _check_runner(runner, cluster, registry)
        return main(
            lifecycle,
            settings,
            places=places,
            doors=_doors(hosts, origins, proxies),
            listen=listen,
            insecure=insecure,
            work=None
            if templates is None
            else partial(_work, state, templates, jobs_at_once, cluster, registry),
            oidc=None if oidc is None else read_provider(oidc),
            quotas=Quotas.of(quotas or ()),
        )

    in_foreground("gateway", body, config, assignments, endpoints, insecure=insecure)


@gateway_commands.command()
@at_places("state", "database", "registry")
def migrate(places: "Places") -> None:
    """Make the tables of both databases where there are none, and end."""
    from penstock.config.run_folder import keep_private
    from penstock.gateway.process import open_accounts_database, open_registry

    keep_private()
    if not (places.database and places.registry):
        places.state.mkdir(parents=True, exist_ok=True, mode=0o700)
    for opened in (open_accounts_database(places), open_registry(places)):
        opened.close()
    typer.echo("the tables are up to date")


@gateway_commands.command("keys")
def make_keys(file: Annotated[Path, typer.Argument(help="Written once, for its owner alone.")]) -> None:
    """Write a file of signing keys for several gateways to share."""

    def body() -> int:
        from penstock.gateway.accounts.sessions import make_keys, read_keys

        try:
            make_keys(file)
        except OSError as error:  # it names a file beside this one, which becomes this one
            raise OSError(error.errno, error.strerror, str(file)) from error
        read_keys(file)
        return EXIT_OK

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
        from penstock.gateway.text_api import main

        return main(lifecycle, settings, agents=_text_servers(server, agents or (), settings), listen=listen)

    in_foreground("gateway", body, config, assignments, endpoints, insecure=insecure)


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
    from penstock.gateway.text_api import FIRST
    from penstock.launch.gateway.run_behind import NamedServer

    if not server and not agents:
        raise ConfigurationError("--server: name the server of text, or several with --agent NAME=…")
    others = named_agents(agents, settings)
    if not server:
        return others
    return {FIRST: NamedServer(checked_address("--server", server), "", settings), **others}


def _check_runner(runner: RunnerName, cluster: Path | None, registry: str) -> None:
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
    from penstock.gateway.process import Places, Work
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
            url = Places(state=state, registry=registry).registry_url()
            return Work(
                runner=local, steering=RunSteering(local.run_folder, url), at_once=at_once, services=services
            )
        pods = KubernetesRunner(state / "jobs", templates, read_cluster(cluster))
    except OSError as error:
        raise ConfigurationError(f"--state {state}: {error.strerror}") from error
    return Work(
        runner=pods, steering=PodSteering(pods.run_folder, registry), at_once=at_once, services=services
    )


def _doors(hosts: list[str] | None, origins: list[str] | None, proxies: list[str] | None) -> "Doors":
    from penstock.gateway.frame.envelope import Doors

    return Doors(hosts=frozenset(hosts or ()), origins=frozenset(origins or ()), proxies=tuple(proxies or ()))


def _services() -> "list[Service]":
    paths = [workload.http for workload in map(find, installed()) if workload.http]
    return [cast("Service", load(path)()) for path in paths]


# ---- Sites: the API of a workload over one run, and further runs behind it by name.


def named_agents(said: "Sequence[str]", settings: "Settings") -> "dict[str, RunBehind]":
    """Return the runs that `NAME=DIR` and `NAME=ADDRESS` say, by name; raises ConfigurationError for others.

    settings: what was said here, of the runs that are known by an address alone.
    """
    from penstock.launch.gateway.run_behind import NamedRun, NamedServer

    found: dict[str, RunBehind] = {}
    for one in said:
        agent, _, place = one.partition("=")
        if not _NAME.fullmatch(agent) or not place:
            raise ConfigurationError(
                f"--agent {one!r}: write NAME=DIR or NAME=ADDRESS; a name has 1 to 64 of A-Z, a-z, 0-9, . _ -"
            )
        if agent in found:
            raise ConfigurationError(f"--agent {one}: {agent} is named twice")
        is_folder = Path(place).is_dir()
        found[agent] = (
            NamedRun(Path(place))
            if is_folder
            else NamedServer(checked_address("--agent", place), "", settings)
        )
    return found


def checked_address(option: str, address: str) -> str:
    """Return an address of a server, or ""; raises ConfigurationError that names the option."""
    from penstock.rpc.address import check_address

    try:
        return check_address(address) if address else ""
    except ValueError as error:
        raise ConfigurationError(f"{option}: {error}") from error


def _sites() -> list[str]:
    return sorted(name for name in installed() if find(name).site)


def _command(name: str) -> "Callable[..., None]":
    def serve_site(
        run: Annotated[
            Path | None, typer.Option("--run", metavar="DIR", help="Folder of a run that goes on and serves.")
        ] = None,
        server: Annotated[
            str, typer.Option("--server", metavar="ADDRESS", help="A policy server: HOST:PORT or unix:/path.")
        ] = "",
        broker: Annotated[
            str, typer.Option("--broker", metavar="ADDRESS", help="With --server: the broker of its run.")
        ] = "",
        listen: Annotated[str, typer.Option(metavar="ADDRESS", help="HOST:PORT.")] = "127.0.0.1:8765",
        state: Annotated[
            Path | None,
            typer.Option(
                "--state",
                help="Folder of what it keeps, and of the run that is begun here; default: NAME-state.",
            ),
        ] = None,
        agents: FurtherAgents = None,
        recipe: Annotated[
            Path | None, typer.Option("--recipe", help="What is trained; default: the workload's own.")
        ] = None,
        train: Annotated[
            list[str] | None,
            typer.Option("--train", metavar="SECTION.KEY=VALUE", help="Setting of the run; may be repeated."),
        ] = None,
        learn: Annotated[
            bool,
            typer.Option("--learn", help="Also learn from what people say, where NAME has a loop for it."),
        ] = False,
        loop: Annotated[
            list[str] | None,
            typer.Option(
                "--loop",
                metavar="OPTION=VALUE",
                help="With --learn: option of that loop, such as labels=100; may be repeated.",
            ),
        ] = None,
        project: Annotated[
            str, typer.Option("--project", help="Beyond loopback: project whose tokens count.")
        ] = "",
        accounts: Annotated[
            Path,
            typer.Option("--accounts", help="State folder of the gateway that gives out the tokens."),
        ] = STATE,
        database: Annotated[
            str, typer.Option("--database", metavar="URL", help="Its accounts, where they lie elsewhere.")
        ] = "",
        keys: Annotated[Path | None, typer.Option("--keys", help="Its file of signing keys.")] = None,
        hosts: HostNames = None,
        origins: Origins = None,
        proxies: Proxies = None,
        config: ConfigFile = None,
        assignments: Assignments = None,
        endpoints: EndpointFile = None,
        insecure: Insecure = False,
    ) -> None:
        def body(lifecycle: "Lifecycle", settings: "Settings") -> int:
            from penstock.gateway.sites.site_process import Reach, main
            from penstock.launch.gateway.run_behind import NamedRun, NamedServer, OwnRun

            site: Site = load(find(name).site)()
            _check_one(run, server, broker)
            others = agents_of(name, site, agents or (), settings)
            words = loop_words(name, site, loop or (), learn=learn, server=server)
            kept = state or Path(f"{name}-state")
            behind: RunBehind
            if run is not None:
                behind = NamedRun(run)
            elif server:
                behind = NamedServer(
                    checked_address("--server", server), checked_address("--broker", broker), settings
                )
            else:
                behind = OwnRun.of_site(site, kept, recipe, train or (), learns=learn)
                if words is not None and site.loop is not None and recipe is None:
                    words = (*site.loop.options, *words)
            reach = Reach(
                listen=listen,
                doors=_doors(hosts, origins, proxies),
                project=project,
                accounts=lambda: _accounts(accounts, database, keys),
                insecure=insecure,
            )
            return main(
                lifecycle,
                settings,
                site=site,
                behind=behind,
                reach=reach,
                state=kept,
                agents=others,
                beside=_beside(site, words, kept),
            )

        in_foreground("gateway", body, config, assignments, endpoints, insecure=insecure)

    serve_site.__doc__ = f"Serve the API of {name} over one run, which is begun unless one is named."
    return serve_site


@contextmanager
def _accounts(state: Path, database: str, keys: Path | None) -> "Iterator[Accounts]":
    from penstock.gateway.process import Places, open_accounts

    accounts, opened = open_accounts(Places(state=state, database=database, keys=keys), make=False)
    try:
        yield accounts
    finally:
        opened.close()


def loop_words(
    name: str, site: "Site", said: "Sequence[str]", *, learn: bool, server: str
) -> tuple[str, ...] | None:
    """Return the options of a site's loop, None where it is not to learn.

    Raises ConfigurationError for options that the loop would refuse, and for those of none.
    """
    if not learn:
        if said:
            raise ConfigurationError(f"--loop {said[0]}: belongs to --learn, which starts the loop")
        return None
    if site.loop is None:
        raise ConfigurationError(f"--learn: {name} has no loop: leave it out")
    if server:
        raise ConfigurationError("--learn: needs the folder of the run: name it with --run, not --server")
    for one in said:
        if not one.partition("=")[2]:
            raise ConfigurationError(f"--loop {one!r}: write OPTION=VALUE, such as labels=100")
    words = tuple(f"--{one}" for one in said)
    site.loop.check(words)
    return words


def agents_of(name: str, site: "Site", said: "Sequence[str]", settings: "Settings") -> "dict[str, RunBehind]":
    """Return the further runs of a site by name; raises ConfigurationError for what is none."""
    if said and not site.takes_agents:
        raise ConfigurationError(f"--agent {said[0]}: {name} answers for one run: leave it out")
    return named_agents(said, settings)


def _beside(
    site: "Site", words: tuple[str, ...] | None, state: Path
) -> "Callable[[RunBehind], AbstractContextManager[object]] | None":
    """Return what makes the site's loop for a run; None without one."""
    from penstock.launch.gateway.run_behind import LoopBeside

    loop = site.loop
    if words is None or loop is None:
        return None
    return lambda run: LoopBeside(loop.words, words, run.settings, state)


def _check_one(run: Path | None, server: str, broker: str) -> None:
    if run is not None and server:
        raise ConfigurationError("--run, --server: name one of them")
    if broker and not server:
        raise ConfigurationError("--broker: belongs to --server; a run's folder says where its broker is")
