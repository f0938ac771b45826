"""The group of all commands: those of the core, and those that installed workloads add (`Workload.commands`).

The module of a command is imported when the command is looked up, so that help is fast. An error that any
command raises for a file that cannot be read or written, and for a word that is no text, ends here.
"""

import errno
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from penstock.config.configuration_error import ConfigurationError, how_to_install
from penstock.config.url_secrets import REDIS_REMEDY, remedy, secret_in, without_secret
from penstock.config.workload import Workload, installed, load, record_of
from penstock.runtime.exit import EXIT_USAGE
from penstock.runtime.foreground import command as add_command

# ---- Errors about files and folders of the command line, as messages: option, value, remedy.

_REMEDIES: Final = {
    errno.ENOENT: "name one that is there",
    errno.ENOTDIR: "a file stands where a folder is wanted; name another place",
    errno.EISDIR: "is a folder; name a file",
    errno.EEXIST: "a file stands where a folder is wanted; name another place",
    errno.EACCES: "give this user the right to it, or name another place",
    errno.EPERM: "give this user the right to it, or name another place",
    errno.EROFS: "name a place that can be written",
    errno.ENOSPC: "make room, or name a place on another disk",
    errno.EDQUOT: "make room, or name a place on another disk",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "a link leads back to itself; name another place",
    errno.ENXIO: "no process is at the other end; name a regular file",
}

_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class _Named:
    """A path on the command line. key: the option, "" for an argument. value: the word."""

    key: str
    value: str

    @property
    def place(self) -> Path:
        return Path(self.value).absolute()

    @property
    def text(self) -> str:
        return f"{self.key} {self.value}".strip()


def file_mistake(error: OSError, words: Sequence[str]) -> str | None:
    """Return the message for an error about a file; None for another error.

    words: of the command line. An error of a full disk names no file: then the first path on a full disk is
    named.
    """
    remedy = _REMEDIES.get(error.errno or 0)
    if error.filename is None and error.errno in _NO_ROOM:
        for one in _places(words):
            there = next(folder for folder in (one.place, *one.place.parents) if folder.exists())
            if os.statvfs(there).f_bavail == 0:
                return f"{one.text}: {error.strerror}; {remedy}"
        return f"{error.strerror}; {remedy}"
    if remedy is None or not isinstance(error.filename, str | bytes):
        return None
    file = Path(os.fsdecode(error.filename)).absolute()
    # The longest path of the command line that is the file or holds it.
    found = [one for one in _places(words) if file == one.place or one.place in file.parents]
    named = max(found, key=lambda one: len(one.place.parts), default=None)
    if named is None:
        return f"{file}: {error.strerror}; {remedy}"
    where = "" if named.place == file else f"{file}: "
    return f"{named.text}: {where}{error.strerror}; {remedy}"


def encoding_mistake(error: UnicodeDecodeError) -> str:
    """Return the message for a file that is not text, without its content, which may be a password."""
    return f"a file holds what is not UTF-8 at byte {error.start}; save it as UTF-8"


def word_mistake(words: Sequence[str]) -> str | None:
    """Return the message for the first word that is not UTF-8; None where all are."""
    for named in _places(words):
        try:
            named.value.encode()
        except UnicodeEncodeError:
            return f"{named.key} {named.value!r}: no text; write it in UTF-8".strip()
    return None


def _places(words: Sequence[str]) -> Iterator[_Named]:
    option = ""
    for word in words:
        before, joined, behind = word.partition("=")
        if word.startswith("-") and not joined:
            option = word
            continue
        option, value = (before, behind) if word.startswith("-") else (option, word)
        key, assigned, path = value.partition("=")
        if assigned and option == "--set":
            yield _Named(f"--set {key}", path.strip("\"'"))
        elif value and "\0" not in value:
            yield _Named(option, value)
        option = ""


# ---- Secrets on a command line, which everybody on the machine can read.

_KEY: Final = "security.redis_password="
_ASSIGNED: Final = re.compile(r"(--set=|--[\w-]+=)?([\w.-]+=)?(?=[a-z][a-z0-9+.-]*://)", re.IGNORECASE)


def check_words(words: Sequence[str]) -> None:
    """Raise ConfigurationError for a secret; it names the URL or key, and where the secret belongs."""
    for word in words:
        if word.removeprefix("--set=").startswith(_KEY):
            raise ConfigurationError(
                f"--set {_KEY}…: everybody on this machine can read a command line; {REDIS_REMEDY}"
            )
        head = _ASSIGNED.match(word)
        url = word[head.end() :] if head else word
        where = secret_in(url)
        if where is not None:
            named = f"{word[: len(word) - len(url)]}{without_secret(url)}"
            raise ConfigurationError(
                f"{named}: holds a secret in {where}, and everybody on this machine can read a command line; "
                f"{remedy(url)}"
            )


_LAUNCH: Final = "penstock.launch"
COMMANDS: Final = {
    "status": (
        f"{_LAUNCH}.inspection.status:status",
        "Show what a run is doing and what sets its pace, until Ctrl-C on a terminal, else once.",
    ),
    "audit": (
        f"{_LAUNCH}.audit.audit_command:audit_run",
        "Say for every acknowledged fragment where it went.",
    ),
    "evaluate": (
        f"{_LAUNCH}.commands.play:evaluate",
        "Play the final policy of a run on separate environments.",
    ),
    "record": (
        f"{_LAUNCH}.commands.play:record_final",
        "Record the final policy of a run at play, for `penstock train --from`.",
    ),
    "plot": (
        f"{_LAUNCH}.commands.plot:plot",
        "Draw return, rate and staleness of runs over environment steps into one picture.",
    ),
    "graph": (
        f"{_LAUNCH}.commands.plot:graph",
        "Draw the learning curve of a run in the terminal, until it ends.",
    ),
    "certificates": (
        f"{_LAUNCH}.commands.certificates:main",
        "Make an authority, certificates and tokens for a run; called again: new ones of the same authority.",
    ),
    "doctor": (f"{_LAUNCH}.commands.doctor:doctor", "Check that this machine can run Penstock."),
    "policy": (
        f"{_LAUNCH}.policy.policy_commands:policy_commands",
        "Versions that were registered: look, promote, roll back, export.",
    ),
    "control": (
        f"{_LAUNCH}.control.control_commands:control_commands",
        "Control an active run: pause, resume, stop, checkpoint, flush, restore.",
    ),
    "gateway": (
        f"{_LAUNCH}.gateway.gateway_commands:gateway_commands",
        "Serve people over HTTP: accounts, projects, feedback.",
    ),
    "jobs": (
        f"{_LAUNCH}.jobs.job_commands:job_commands",
        "Trainings in the background of this machine.",
    ),
}
"""Commands of the core that are imported when they are looked up: path and short help by name."""
_SERVICES: Final = ("redis", "broker", "actor", "learner", "serve")
"""The services of a run, which help lists separately."""

_WORDS: Final = "penstock.words"
"""Key of the command line in a context."""


class WithPluginCommands(TyperGroup):
    """The commands of the core, which are looked up first, and those of workloads."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse, and keep the words for `invoke`; a secret among them is refused."""
        ctx.meta[_WORDS] = tuple(args)
        try:
            check_words(args)
        except ConfigurationError as error:
            sys.stderr.write(f"{error}\n")
            raise typer.Exit(EXIT_USAGE) from error
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; an error about a file or a word of the command line is bad usage."""
        try:
            return super().invoke(ctx)
        except OSError as error:
            message = file_mistake(error, ctx.meta[_WORDS])
            if message is None:
                raise
        except UnicodeDecodeError as error:
            message = encoding_mistake(error)
        except UnicodeEncodeError:
            message = word_mistake(ctx.meta[_WORDS])
            if message is None:
                raise
        sys.stderr.write(f"{message}\n")
        raise typer.Exit(EXIT_USAGE)

    def list_commands(self, ctx: Any) -> list[str]:
        """List those of the core first."""
        own = [*super().list_commands(ctx), *COMMANDS]
        return [*own, *sorted(plugin_paths().keys() - set(own))]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of a name; imports its module."""
        found = super().get_command(ctx, cmd_name)
        if found is not None:
            return found
        if cmd_name in COMMANDS:
            return _command(ctx, cmd_name, COMMANDS[cmd_name][0], add_command)
        if (path := plugin_paths().get(cmd_name)) is not None:
            return _command(ctx, cmd_name, path, typer.Typer.command)
        for record in _records():
            if cmd_name in record.moved_commands:
                sys.stderr.write(
                    f"penstock {cmd_name}: the command is `penstock {record.moved_commands[cmd_name]}`\n"
                )
                raise typer.Exit(EXIT_USAGE)
        return None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands for help, the services below a heading of their own."""
        names = self.list_commands(ctx)
        for heading in ("Commands", "Services"):
            chosen = [name for name in names if (name in _SERVICES) == (heading == "Services")]
            width = formatter.width - 6 - max(map(len, names))
            with formatter.section(heading):
                formatter.write_dl([(name, self._short_help(ctx, name, width)) for name in chosen])

    def _short_help(self, ctx: Any, name: str, width: int) -> str:
        is_listed = name in COMMANDS
        found = TyperCommand(name, help=COMMANDS[name][1]) if is_listed else self.get_command(ctx, name)
        return str(found.get_short_help_str(width))


def plugin_paths() -> dict[str, str]:
    """Return the paths of all workloads' commands, by name.

    A record that cannot be imported, and a second command of a name, are reported on stderr and left out.
    """
    paths: dict[str, str] = {}
    for record in _records():
        for name, path in record.commands.items():
            if paths.setdefault(name, path) != path:
                sys.stderr.write(
                    f"workload={record.name!r}: another workload has a command {name!r}; left out\n"
                )
    return paths


def _records() -> Iterator[Workload]:
    for workload in installed():
        try:
            yield record_of(workload)
        except ConfigurationError as error:
            sys.stderr.write(f"{error}\n")


def _command(ctx: Any, name: str, path: str, add: Callable[[typer.Typer, str], Callable[..., Any]]) -> Any:
    """Return the command at a path. add: makes a function a command of a Typer group."""
    outer = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    try:
        found = load(path)
    except ConfigurationError as error:
        is_absent = name in COMMANDS and isinstance(error.__cause__, ModuleNotFoundError)
        remedy = f"; {how_to_install('launch')}" if is_absent else ""
        sys.stderr.write(f"{error}{remedy}\n")
        raise typer.Exit(EXIT_USAGE) from error
    if isinstance(found, typer.Typer):
        outer.add_typer(found, name=name)
    else:
        add(outer, name)(found)
    return typer.main.get_group(outer).get_command(ctx, name)
