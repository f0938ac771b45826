"""No command of the command line is forgotten by the tables of bad input."""

from collections.abc import Iterable, Iterator

import typer
from typer.main import get_command

from penstock.launch.cli.app import app
from tests.abuse.test_bad_input import COMMANDS
from tests.processes.abuse.test_bad_service_input import REFUSED

Words = tuple[str, ...]


def commands() -> set[Words]:
    """Every command by its words; a group that does something by itself is one."""
    root = get_command(app)

    def below(command: object, words: Words) -> Iterator[Words]:
        if not isinstance(command, typer.core.TyperGroup):
            yield words
            return
        if command.invoke_without_command:
            yield words
        for name in command.list_commands(context):
            yield from below(command.get_command(context, name), (*words, name))

    context = typer.Context(root)
    return set(below(root, ()))


def asked(known: set[Words], rows: Iterable[Words]) -> set[Words]:
    """The commands that rows of words call: of each row the longest that it begins with."""
    return {max((one for one in known if words[: len(one)] == one), key=len, default=()) for words in rows}


def test_each_command_has_a_row_of_bad_input() -> None:
    known = commands()
    rows = [words for table in (COMMANDS, REFUSED) for words, _ in table.values()]
    assert known - asked(known, rows) == set()


def test_a_command_that_is_new_would_be_missed() -> None:
    new = ("gateway", "token", "renew")
    rows = [("gateway", "--listen", "x"), ("gateway", "token", "add", "t")]
    assert new not in asked({*commands(), new}, rows)
