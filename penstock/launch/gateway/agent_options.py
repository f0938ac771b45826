"""The option `--agent`: further runs, or their servers, behind one gateway, each by a name."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from penstock.config.settings import Settings
    from penstock.gateway.sites.site_process import RunBehind

FurtherAgents = Annotated[
    list[str] | None,
    typer.Option(
        "--agent",
        metavar="NAME=DIR|ADDRESS",
        help="A further run, or the server of one, where several are answered for; may be repeated.",
    ),
]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def named_agents(
    said: "Sequence[str]", settings: "Settings"
) -> "dict[str, AbstractContextManager[RunBehind]]":
    """Return the runs that `NAME=DIR` and `NAME=ADDRESS` say, by name; raises ConfigurationError for others.

    settings: what was said here, of the runs that are known by an address alone.
    """
    from penstock.config.configuration_error import ConfigurationError
    from penstock.launch.gateway.run_behind import NamedRun, NamedServer

    found: dict[str, AbstractContextManager[RunBehind]] = {}
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
