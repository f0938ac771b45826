"""The group of all commands: those of the core, and those that installed workloads add (`Workload.commands`).

It is the boundary as well: what any command raises for a file that cannot be read or written, and for a word
that is no text, ends here.
"""

import errno
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import typer
from typer.core import TyperGroup

from penstock.config.configuration_error import ConfigurationError
from penstock.config.url_secrets import REDIS_REMEDY, remedy, secret_in, without_secret
from penstock.config.workload import Workload, installed, load, record_of
from penstock.runtime.exit import EXIT_USAGE

# ---- A file or folder that cannot be what the command line wants of it, told as a mistake: key, value,
# remedy.

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
    """A place that a word of the command line names. key: the option, "" for an argument."""

    key: str
    value: str

    @property
    def place(self) -> Path:
        return Path(self.value).absolute()

    @property
    def said(self) -> str:
        return f"{self.key} {self.value}".strip()


def file_mistake(error: OSError, words: Sequence[str]) -> str | None:
    """The mistake in words; None for an error that is about no file.

    words: of the command line. A write that finds no room names no file; then the full disk is looked for.
    """
    remedy = _REMEDIES.get(error.errno or 0)
    if error.filename is None and error.errno in _NO_ROOM:
        for one in _places(words):
            there = next(folder for folder in (one.place, *one.place.parents) if folder.exists())
            if os.statvfs(there).f_bavail == 0:
                return f"{one.said}: {error.strerror}; {remedy}"
        return f"{error.strerror}; {remedy}"
    if remedy is None or not isinstance(error.filename, str | bytes):
        return None
    file = Path(os.fsdecode(error.filename)).absolute()
    # The longest of the places that were said which is the file or holds it.
    found = [one for one in _places(words) if file == one.place or one.place in file.parents]
    named = max(found, key=lambda one: len(one.place.parts), default=None)
    if named is None:
        return f"{file}: {error.strerror}; {remedy}"
    where = "" if named.place == file else f"{file}: "
    return f"{named.said}: {where}{error.strerror}; {remedy}"


def encoding_mistake(error: UnicodeDecodeError) -> str:
    """A file that was to hold text and does not; it may hold a password, so nothing of it is repeated."""
    return f"a file holds what is not UTF-8 at byte {error.start}; save it as UTF-8"


def word_mistake(words: Sequence[str]) -> str | None:
    """The first word that is no text, where one is wanted; None where all of them are."""
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


# ---- Secrets on a command line, which everybody on the machine can read: refused before anything else.

_KEY: Final = "security.redis_password="
_ASSIGNED: Final = re.compile(r"(--set=|--[\w-]+=)?([\w.-]+=)?(?=[a-z][a-z0-9+.-]*://)", re.IGNORECASE)


def check_words(words: Sequence[str]) -> None:
    """Raise ConfigurationError that names URL or key, not the secret, and where the secret belongs."""
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


_SERVICES: Final = ("redis", "broker", "actor", "learner", "serve")
"""The processes of a run, which an operator may start one by one: help lists them apart."""

_WORDS: Final = "penstock.words"
"""Where a context keeps the command line."""


class WithPluginCommands(TyperGroup):
    """The commands of the core, which are looked up first, without any record, and those of workloads."""

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
        """Run the command; a file or a word that it cannot use is bad usage."""
        try:
            return super().invoke(ctx)
        except OSError as error:
            told = file_mistake(error, ctx.meta[_WORDS])
            if told is None:
                raise
        except UnicodeDecodeError as error:
            told = encoding_mistake(error)
        except UnicodeEncodeError:
            told = word_mistake(ctx.meta[_WORDS])
            if told is None:
                raise
        sys.stderr.write(f"{told}\n")
        raise typer.Exit(EXIT_USAGE)

    def list_commands(self, ctx: Any) -> list[str]:
        """List those of the core first."""
        own = super().list_commands(ctx)
        return [*own, *sorted(plugin_paths().keys() - set(own))]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of a name; imports the module of a workload's command."""
        found = super().get_command(ctx, cmd_name)
        if found is not None:
            return found
        path = plugin_paths().get(cmd_name)
        if path is not None:
            return _command(ctx, cmd_name, path)
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
            commands = [(name, self.get_command(ctx, name)) for name in chosen]
            width = formatter.width - 6 - max(map(len, names))
            with formatter.section(heading):
                formatter.write_dl([(name, command.get_short_help_str(width)) for name, command in commands])


def plugin_paths() -> dict[str, str]:
    """Return the paths of all workloads' commands, by name.

    A record that cannot be imported, and a name that is taken, are named on stderr and left out.
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


def _command(ctx: Any, name: str, path: str) -> Any:
    outer = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    try:
        found = load(path)
    except ConfigurationError as error:
        sys.stderr.write(f"{error}\n")
        raise typer.Exit(EXIT_USAGE) from error
    if isinstance(found, typer.Typer):
        outer.add_typer(found, name=name)
    else:
        outer.command(name)(found)
    return typer.main.get_group(outer).get_command(ctx, name)
