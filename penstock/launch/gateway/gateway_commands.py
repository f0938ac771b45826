"""`penstock gateway`: serve HTTP with accounts, and its sites.

Each installed workload that has an API of its own (`Workload.site`) adds a command `penstock gateway NAME`.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, cast

import typer
from typer.core import TyperGroup

from penstock.config.configuration_error import ConfigurationError, how_to_install
from penstock.config.workload import find, installed, load
from penstock.launch.gateway.people import (
    STATE,
    AccountsPlace,
    DatabaseUrl,
    RegistryUrl,
    State,
    token_commands,
    user_commands,
)
from penstock.runtime.exit import EXIT_OK, EXIT_USAGE
from penstock.runtime.foreground import ListenHttp, SecuredForeground, command, unfolded

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from penstock.config.settings import Settings
    from penstock.gateway.application import Service
    from penstock.gateway.frame.envelope import Doors
    from penstock.gateway.process import Mount, Work
    from penstock.gateway.upstream import RunBehind
    from penstock.runtime.lifecycle import Lifecycle

    Opened = Callable[..., AbstractContextManager[Any]]

# ---- Options.

HostNames = Annotated[
    list[str] | None,
    typer.Option("--host", help="Another name by which clients reach it; may be repeated."),
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
QuotaList = Annotated[
    list[str] | None,
    typer.Option(
        "--quota", metavar="NAME=NUMBER", help="Most that a project may have stored; may be repeated."
    ),
]
ProviderFile = Annotated[
    Path | None,
    typer.Option("--oidc", metavar="FILE", help="People may sign in at the provider that it names."),
]
FurtherSites = Annotated[
    list[str] | None,
    typer.Option(
        "--site",
        metavar="NAME[=HOST:PORT]",
        help="Also serve what `penstock gateway NAME` does, for this machine; may be repeated.",
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
SITE_ADDRESS: Final = "127.0.0.1:8765"
BEYOND: Final = (
    "beyond this machine a token is asked for: say --project NAME, and --accounts or --database of the "
    "gateway that gives out its tokens"
)
ALONE: Final = "mounted in a gateway it answers only this machine: serve it with `penstock gateway {name}`"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class WithSites(TyperGroup):
    """The commands of the gateway, followed by one for each site."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """Options of how a listener is reached."""

    hosts: HostNames = None
    origins: Origins = None
    proxies: Proxies = None

    def doors(self) -> "Doors":
        from penstock.gateway.frame.envelope import Doors

        return Doors(
            hosts=frozenset(self.hosts or ()),
            origins=frozenset(self.origins or ()),
            proxies=tuple(self.proxies or ()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkOptions:
    """Options of how a gateway runs trainings."""

    templates: Annotated[
        Path | None,
        typer.Option(
            "--templates", help="Folder of templates: people may have trainings run here that they describe."
        ),
    ] = None
    runner: Annotated[
        Literal["local", "kubernetes"],
        typer.Option("--runner", help="Where trainings run: as processes here, or as Jobs of a cluster."),
    ] = "local"
    cluster: Annotated[
        Path | None,
        typer.Option("--cluster", metavar="FILE", help="Describes it, for --runner kubernetes."),
    ] = None
    models: Annotated[
        Path | None,
        typer.Option("--models", help="Folder below which models that were trained are exported."),
    ] = None
    jobs_at_once: Annotated[
        int, typer.Option("--jobs-at-once", min=1, help="Trainings at the same time; others queue.")
    ] = 1


@gateway_commands.callback(invoke_without_command=True)
@unfolded
def gateway(
    context: typer.Context,
    *,
    listen: ListenHttp = "127.0.0.1:8000",
    accounts: AccountsPlace,
    registry: RegistryUrl = "",
    reached: Reached,
    trainings: WorkOptions,
    quotas: QuotaList = None,
    oidc: ProviderFile = None,
    sites: FurtherSites = None,
    foreground: SecuredForeground,
) -> None:
    """Serve people over HTTP. With a command behind it: look after people and tokens."""
    _check_extra()
    if context.invoked_subcommand is not None:
        _refuse_options_before(context, context.invoked_subcommand)
        return

    def body(lifecycle: "Lifecycle", settings: "Settings") -> int:
        from penstock.gateway.accounts.audit import Quotas
        from penstock.gateway.accounts.oidc import read_provider
        from penstock.gateway.process import Mount, Places, gateway_of, main

        places = Places(
            state=accounts.state,
            database=accounts.database,
            registry=registry,
            keys=accounts.keys,
            models=trainings.models,
        )
        _check_runner(trainings.runner, trainings.cluster, registry)
        doors, templates = reached.doors(), trainings.templates
        work = None if templates is None else partial(_work, accounts.state, templates, trainings, registry)
        provider = None if oidc is None else read_provider(oidc)
        mount = Mount(
            name="gateway",
            listen=listen,
            open=partial(gateway_of, places, doors, work, provider, Quotas.of(quotas or ())),
            insecure=foreground.insecure,
            proxies=doors.proxies,
        )
        return main(lifecycle, settings, [mount, *further_mounts(sites or (), settings)])

    foreground.run("gateway", body)


@command(gateway_commands)
def migrate(state: State = STATE, database: DatabaseUrl = "", registry: RegistryUrl = "") -> int:
    """Make the tables of both databases where there are none, and end."""
    from penstock.config.run_folder import keep_private
    from penstock.gateway.process import Places, open_accounts_database, open_registry

    places = Places(state=state, database=database, registry=registry)
    keep_private()
    if not (database and registry):
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
    for opened in (open_accounts_database(places), open_registry(places)):
        opened.close()
    typer.echo("the tables are up to date")
    return EXIT_OK


@command(gateway_commands, "keys")
def make_keys(file: Annotated[Path, typer.Argument(help="Written once, for its owner alone.")]) -> int:
    """Write a file of signing keys for several gateways to share."""
    from penstock.gateway.accounts import sessions

    try:
        sessions.make_keys(file)
    except OSError as error:  # it names a file beside this one, which becomes this one
        raise OSError(error.errno, error.strerror, str(file)) from error
    sessions.read_keys(file)
    return EXIT_OK


@gateway_commands.command("text")
@unfolded
def text(
    *,
    server: Annotated[
        str, typer.Option("--server", metavar="ADDRESS", help="Server of text: HOST:PORT or unix:/path.")
    ] = "",
    agents: FurtherAgents = None,
    listen: Annotated[str, typer.Option(metavar="ADDRESS", help="HOST:PORT of this machine.")] = SITE_ADDRESS,
    foreground: SecuredForeground,
) -> None:
    """Serve agents the API that they know (OpenAI's chat completions), over one server of text or several."""

    def body(lifecycle: "Lifecycle", settings: "Settings") -> int:
        from penstock.config.credentials import credentials
        from penstock.gateway.process import main
        from penstock.gateway.text_api import FIRST, text_of

        if not server and not agents:
            raise ConfigurationError("--server: name the server of text, or several with --agent NAME=…")
        runs = named_agents(agents or (), settings)
        if server:
            runs = {FIRST: _named_server("--server", server, "", settings), **runs}
        opened = partial(text_of, runs, credentials(settings.security))
        return main(lifecycle, settings, [text_mount(listen, opened)])

    foreground.run("gateway", body)


def text_mount(listen: str, opened: "Callable[[], AbstractContextManager[Any]]") -> "Mount":
    """Return the API of agents at an address of this machine, always in plaintext."""
    from penstock.gateway.process import Mount

    kept_here = "without accounts it answers this machine alone: say 127.0.0.1:PORT"
    return Mount(name="text", listen=listen, open=opened, kept_here=kept_here, is_plain=True)


def _check_extra() -> None:
    """End with what to install where a package of the extra `gateway` is absent."""
    absent = [name for name in ("argon2", "fastapi", "jwt", "uvicorn") if find_spec(name) is None]
    if absent:
        typer.echo(f"no gateway without {', '.join(absent)}; {how_to_install('gateway')}", err=True)
        raise typer.Exit(EXIT_USAGE)


def _refuse_options_before(context: typer.Context, command: str) -> None:
    """End where an option stands before a command, which would not see it: it has its own."""
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        if source is not None and source.name == "COMMANDLINE":
            option = parameter.opts[0]
            typer.echo(
                f"{option}: belongs behind the command: penstock gateway {command} … {option} …", err=True
            )
            raise typer.Exit(EXIT_USAGE)


def _check_runner(runner: str, cluster: Path | None, registry: str) -> None:
    if (runner == "kubernetes") is (cluster is None):
        raise ConfigurationError(
            f"--runner {runner} --cluster {cluster}: --runner kubernetes and --cluster FILE come together"
        )
    if runner == "kubernetes" and not registry.startswith("postgresql://"):
        raise ConfigurationError(
            f"--registry {registry!r}: trainings on a cluster register their versions in it from their "
            "pods; name a PostgreSQL"
        )


def _work(state: Path, templates: Path, options: WorkOptions, registry: str) -> "Work":
    """Return what runs jobs; raises ConfigurationError.

    registry: URL of the registry of their runs; "": a file in `state`.
    """
    from penstock.gateway.process import Places, Work
    from penstock.launch.gateway.job_templates import check_templates
    from penstock.launch.gateway.kubernetes_runner import KubernetesRunner, read_cluster
    from penstock.launch.gateway.local_runner import LocalRunner
    from penstock.launch.gateway.run_steering import PodSteering, RunSteering

    if not templates.is_dir():
        raise ConfigurationError(f"--templates {templates}: no folder")
    paths = [workload.http for workload in map(find, installed()) if workload.http]
    services = [cast("Service", load(path)()) for path in paths]
    kinds = {kind for one in services for kind in one.kinds}
    check_templates(templates, kinds)  # before the folder of the jobs is made
    runner: LocalRunner | KubernetesRunner
    try:
        if options.cluster is None:
            runner = LocalRunner(state / "jobs", templates)
            url = Places(state=state, registry=registry).registry_url()
            steering = RunSteering(runner.run_folder, url)
        else:
            runner = KubernetesRunner(state / "jobs", templates, read_cluster(options.cluster))
            steering = PodSteering(runner.run_folder, registry)
    except OSError as error:
        raise ConfigurationError(f"--state {state}: {error.strerror}") from error
    return Work(runner=runner, steering=steering, at_once=options.jobs_at_once, services=services)


# ---- Sites: the API of a workload over one run, and further runs behind it by name.


def named_agents(said: "Sequence[str]", settings: "Settings") -> "dict[str, RunBehind]":
    """Return the runs of options `NAME=DIR` and `NAME=ADDRESS` by name; raises ConfigurationError.

    settings: of this process, for runs that are given by an address.
    """
    from penstock.launch.gateway.run_behind import NamedRun

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
        found[agent] = NamedRun(Path(place)) if is_folder else _named_server("--agent", place, "", settings)
    return found


def _named_server(option: str, server: str, broker: str, settings: "Settings") -> "RunBehind":
    """Return a run by its addresses. broker: "" for none. Raises ConfigurationError with the option."""
    from penstock.launch.gateway.run_behind import NamedServer
    from penstock.rpc.address import check_address

    for said, address in ((option, server), ("--broker", broker)):
        try:
            if address:
                check_address(address)
        except ValueError as error:
            raise ConfigurationError(f"{said}: {error}") from error
    return NamedServer(server, broker, settings)


def _sites() -> list[str]:
    return sorted(name for name in installed() if find(name).site)


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteOptions:
    """Options of the API of a workload over one run."""

    run: Annotated[
        Path | None, typer.Option("--run", metavar="DIR", help="Folder of a run in progress that serves.")
    ] = None
    server: Annotated[
        str, typer.Option("--server", metavar="ADDRESS", help="A policy server: HOST:PORT or unix:/path.")
    ] = ""
    broker: Annotated[
        str, typer.Option("--broker", metavar="ADDRESS", help="With --server: the broker of its run.")
    ] = ""
    listen: ListenHttp = SITE_ADDRESS
    state: Annotated[
        Path | None,
        typer.Option(
            "--state", help="Folder of what it keeps, and of the run that is begun here; default: NAME-state."
        ),
    ] = None
    agents: FurtherAgents = None
    recipe: Annotated[
        Path | None, typer.Option("--recipe", help="What is trained; default: the workload's own.")
    ] = None
    train: Annotated[
        list[str] | None,
        typer.Option("--train", metavar="SECTION.KEY=VALUE", help="Setting of the run; may be repeated."),
    ] = None
    learn: Annotated[
        bool, typer.Option("--learn", help="Also learn from what people say, where NAME has a loop for it.")
    ] = False
    loop: Annotated[
        list[str] | None,
        typer.Option(
            "--loop",
            metavar="OPTION=VALUE",
            help="With --learn: option of that loop, such as labels=100; may be repeated.",
        ),
    ] = None
    project: Annotated[
        str, typer.Option("--project", help="Beyond loopback: project whose tokens count.")
    ] = ""
    accounts: Annotated[
        Path, typer.Option("--accounts", help="State folder of the gateway that gives out the tokens.")
    ] = STATE
    database: Annotated[
        str, typer.Option("--database", metavar="URL", help="Its accounts, where they lie elsewhere.")
    ] = ""
    keys: Annotated[Path | None, typer.Option("--keys", help="Its file of signing keys.")] = None


def _command(name: str) -> "Callable[..., None]":
    @unfolded
    def serve_site(options: SiteOptions, reached: Reached, foreground: SecuredForeground) -> None:
        def body(lifecycle: "Lifecycle", settings: "Settings") -> int:
            from penstock.gateway.process import Mount, main

            service, _, opened = chosen_site(name, options, settings)
            doors = reached.doors()
            mount = Mount(
                name=name,
                listen=options.listen,
                open=partial(opened, doors, lifecycle.drain),
                insecure=foreground.insecure,
                kept_here="" if options.project else BEYOND,
                proxies=doors.proxies,
                page=service.page,
            )
            return main(lifecycle, settings, [mount])

        foreground.run("gateway", body)

    serve_site.__doc__ = f"Serve the API of {name} over one run, which is begun unless one is named."
    return serve_site


def chosen_site(name: str, options: SiteOptions, settings: "Settings") -> "tuple[Service, RunBehind, Opened]":
    """Return the service of a workload, the run behind it, and what opens both (`process.site_over`).

    Raises ConfigurationError.
    """
    from penstock.config.credentials import credentials
    from penstock.gateway.process import site_over
    from penstock.launch.gateway.run_behind import LoopBeside, NamedRun, OwnRun

    service: Service = load(find(name).site)()
    if options.run is not None and options.server:
        raise ConfigurationError("--run, --server: name one of them")
    if options.broker and not options.server:
        raise ConfigurationError("--broker: belongs to --server; a run's folder says where its broker is")
    if options.agents and not service.takes_agents:
        raise ConfigurationError(f"--agent {options.agents[0]}: {name} serves one run: leave it out")
    loop, state = service.loop, options.state or Path(f"{name}-state")
    words = loop_words(name, service, options.loop or (), learn=options.learn, server=options.server)
    behind: RunBehind
    if options.run is not None:
        behind = NamedRun(options.run)
    elif options.server:
        behind = _named_server("--server", options.server, options.broker, settings)
    else:
        behind = OwnRun.of_site(service, state, options.recipe, options.train or (), learns=options.learn)
        if words is not None and loop is not None and options.recipe is None:
            words = (*loop.options, *words)
    learning = (
        LoopBeside(loop.words, words, state, behind) if loop is not None and words is not None else None
    )
    place = AccountsPlace(state=options.accounts, database=options.database, keys=options.keys)
    opened = partial(
        site_over,
        service,
        behind,
        credentials(settings.security),
        state=state,
        agents=named_agents(options.agents or (), settings),
        loop=learning,
        accounts=place.opened if options.project else None,
        project=options.project,
    )
    return service, behind, opened


def further_mounts(said: "Sequence[str]", settings: "Settings") -> "list[Mount]":
    """Return the listeners of options `--site NAME[=HOST:PORT]`; raises ConfigurationError for other names.

    `text` answers for the runs of those of the others that people talk to.
    """
    from penstock.config.credentials import credentials
    from penstock.gateway.frame.envelope import Doors
    from penstock.gateway.process import Mount
    from penstock.gateway.text_api import text_of

    runs: dict[str, RunBehind] = {}

    @contextmanager
    def open_site(name: str) -> "Iterator[Any]":
        service, behind, opened = chosen_site(name, SiteOptions(), settings)
        with opened(Doors()) as listener:
            if service.takes_agents:
                runs[name] = behind
            yield listener

    @contextmanager
    def open_text() -> "Iterator[Any]":
        if not runs:
            raise ConfigurationError("--site text: serves the runs of other sites: add --site chat")
        found = {name: nullcontext(run) for name, run in runs.items()}
        with text_of(found, credentials(settings.security)) as opened:
            yield opened

    mounts = []
    for one in sorted(said, key=lambda one: one.partition("=")[0] == "text"):
        name, _, listen = one.partition("=")
        if name != "text" and name not in _sites():
            raise ConfigurationError(f"--site {name}: no such site; there are {', '.join(_sites())}, text")
        where = listen or SITE_ADDRESS
        mount = (
            text_mount(where, open_text)
            if name == "text"
            else Mount(
                name=name, listen=where, open=partial(open_site, name), kept_here=ALONE.format(name=name)
            )
        )
        mounts.append(replace(mount, option=f"--site {name}=", is_one_of_several=True))
    return mounts


def loop_words(
    name: str, site: "Service", said: "Sequence[str]", *, learn: bool, server: str
) -> tuple[str, ...] | None:
    """Return the options of a site's loop, None where the site is not to learn.

    Raises ConfigurationError for options that the loop refuses, and for options without a loop.
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
