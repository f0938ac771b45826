"""What a workload says of an API of its own, and what it is told of the run behind it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fastapi import FastAPI, Request

from penstock.gateway.accounts.principal import Membership
from penstock.gateway.store.tables import Role
from penstock.rpc.auth import Credentials


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAddresses:
    """Says where the processes of a run are; "": not known, or not yet."""

    server: str = ""
    broker: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Says what a run was begun with. task: `environment.kwargs`. registry: its URL, "" where not known.

    policy: under which its versions are registered; "": as its server says. folder: of the run; None where
    only addresses are known. false_alarm: of its canaries.
    """

    task: Mapping[str, Any]
    registry: str = ""
    policy: str = ""
    folder: Path | None = None
    false_alarm: float | None = None


class RunBehind:
    """A run that a site answers for. Entering finds or begins it; leaving ends it where it was begun here."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave it as it is."""

    def addresses(self) -> RunAddresses:
        """Return where its processes are now; "" for those that have not come up."""
        raise NotImplementedError

    def settings(self) -> RunSettings | None:
        """Return what it was begun with, None while that is not known.

        Raises ConfigurationError for a folder that this user did not make.
        """
        raise NotImplementedError

    def failure(self) -> str:
        """Return why it is over although it was not asked to end; "" while it goes on, or is not known."""
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Upstream:
    """Tells an application which run it answers for.

    addresses: returns where the processes of the run are now; it may be asked at any time, from any thread.
    credentials: for calls to them. settings: returns what the run was begun with, None while it is not known;
    it raises ConfigurationError for those of a folder that this user did not make. state: folder in which the
    application may keep what it has to remember, made where it is not there; None: nowhere. agents: further
    runs by name, of a site that takes several.
    """

    addresses: Callable[[], RunAddresses]
    credentials: Credentials
    settings: Callable[[], RunSettings | None] = lambda: RunSettings(task={})
    state: Path | None = None
    agents: "Mapping[str, Upstream]" = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A command that learns from what people say of a run, which goes on beside the site.

    words: of `penstock`; the folder of the run comes behind them. check: raises ConfigurationError for
    options that the command would refuse when it begins. settings: of a run that is begun for it. options: of
    the command where the run is that of the site's own recipe.
    """

    words: tuple[str, ...]
    check: Callable[[Sequence[str]], None]
    settings: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Says what a workload answers with under an address of its own.

    recipe: file of what is trained where no run is named. settings: `SECTION.KEY=VALUE` over it, and over a
    run that goes on. make_app: returns the application; it is called once, outside of any event loop.
    open_paths: path prefixes that anybody may GET, such as those of a page. viewer_paths: paths that a viewer
    of the project may call; all others need an editor. loop: what may learn from people beside it.
    takes_agents: whether it answers for several runs at once. page: path of its page for people; "": none.
    """

    recipe: Path
    settings: tuple[str, ...]
    make_app: Callable[[Upstream], FastAPI]
    open_paths: tuple[str, ...] = ()
    viewer_paths: frozenset[str] = frozenset()
    loop: Loop | None = None
    takes_agents: bool = False
    page: str = ""


def member_of_site(request: Request) -> Membership | None:
    """Return who calls; None on loopback, where nobody is asked."""
    found: Membership | None = request.scope.get("penstock.member")
    return found


def caller_of(request: Request) -> str:
    """Return who calls, as the token says; "" where none is asked for."""
    member = member_of_site(request)
    return "" if member is None else member.principal.subject


def is_editor(request: Request) -> bool:
    """Return whether the caller looks after the project; on loopback everybody does."""
    member = member_of_site(request)
    return member is None or member.role.includes(Role.EDITOR)
