"""`penstock gateway NAME` for each installed workload that has an API of its own (`Workload.site`)."""

import re
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from penstock.config.workload import find, installed
from penstock.runtime.foreground import (
    Assignments,
    ConfigFile,
    EndpointFile,
    Insecure,
    assigned,
    in_foreground,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from penstock.config.settings import Settings
    from penstock.gateway.accounts.accounts import Accounts
    from penstock.gateway.sites.site import RunBehind, Site
    from penstock.runtime.lifecycle import Lifecycle


# ---- The option `--agent`: further runs, or their servers, behind one gateway, each by a name.

FurtherAgents = Annotated[
    list[str] | None,
    typer.Option(
        "--agent",
        metavar="NAME=DIR|ADDRESS",
        help="A further run, or the server of one, where several are answered for; may be repeated.",
    ),
]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def named_agents(said: "Sequence[str]", settings: "Settings") -> "dict[str, RunBehind]":
    """Return the runs that `NAME=DIR` and `NAME=ADDRESS` say, by name; raises ConfigurationError for others.

    settings: what was said here, of the runs that are known by an address alone.
    """
    from penstock.config.configuration_error import ConfigurationError
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
    from penstock.config.configuration_error import ConfigurationError
    from penstock.rpc.address import check_address

    try:
        return check_address(address) if address else ""
    except ValueError as error:
        raise ConfigurationError(f"{option}: {error}") from error


# ---- Options of every front that speaks HTTP: under which names it is reached, and whose pages may call.

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


_STATE = Path("gateway-state")


class WithSites(TyperGroup):
    """The commands of the gateway, and behind them one for each site."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands, as help lists them."""
        own = super().list_commands(ctx)
        return [*own, *(name for name in _sites() if name not in own)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of a name, None where there is none."""
        found = super().get_command(ctx, cmd_name)
        if found is not None or cmd_name not in _sites():
            return found
        outer = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        outer.callback()(lambda: None)  # so that typer makes a group, of one command
        outer.command(cmd_name)(_command(cmd_name))
        return typer.main.get_group(outer).get_command(ctx, cmd_name)


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
        ] = _STATE,
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
            from penstock.config.workload import load
            from penstock.gateway.sites.site_process import Reach, main
            from penstock.launch.gateway.run_behind import NamedRun, NamedServer, OwnRun

            site: Site = load(find(name).site)()
            _check_one(run, server, broker)
            others = agents_of(name, site, agents or (), settings)
            words = loop_words(name, site, loop or (), learn=learn, server=server)
            behind: RunBehind
            if run is not None:
                behind = NamedRun(run)
            elif server:
                behind = NamedServer(
                    checked_address("--server", server), checked_address("--broker", broker), settings
                )
            else:
                behind = OwnRun.of_site(
                    site, state or Path(f"{name}-state"), recipe, train or (), learns=learn
                )
                if words is not None and site.loop is not None and recipe is None:
                    words = (*site.loop.options, *words)
            reach = Reach(
                listen=listen,
                hosts=frozenset(hosts or ()),
                origins=frozenset(origins or ()),
                proxies=tuple(proxies or ()),
                project=project,
                accounts=lambda: _accounts(accounts, database, keys),
                insecure=insecure,
            )
            kept = state or Path(f"{name}-state")
            beside = _beside(site, words, kept)
            return main(
                lifecycle,
                settings,
                site=site,
                behind=behind,
                reach=reach,
                state=kept,
                agents=others,
                beside=beside,
            )

        in_foreground("gateway", body, config, list(assigned(assignments, insecure=insecure)), endpoints)

    serve_site.__doc__ = f"Serve the API of {name} over one run, which is begun unless one is named."
    return serve_site


@contextmanager
def _accounts(state: Path, database: str, keys: Path | None) -> "Iterator[Accounts]":
    """Open the accounts of a gateway that is there already."""
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
    from penstock.config.configuration_error import ConfigurationError

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
    from penstock.config.configuration_error import ConfigurationError

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
    from penstock.config.configuration_error import ConfigurationError

    if run is not None and server:
        raise ConfigurationError("--run, --server: name one of them")
    if broker and not server:
        raise ConfigurationError("--broker: belongs to --server; a run's folder says where its broker is")
