"""Commands that take their options as one value: its fields declare the flags (`penstock.config.flags`)."""

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

import typer

from penstock.config.flags import Flag, flags_of

Command = Callable[..., None]


def with_flags_of(kind: type) -> Callable[[Command], Command]:
    """Give a command of Typer the options that `kind` declares; its argument `options` is an instance of it.

    kind: a frozen dataclass whose fields have defaults; a field that is such a dataclass adds its own flags.
    """

    def decorate(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True).parameters.values()
        kept = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own if one.name != "options"]

        @functools.wraps(command)
        def called(**said: Any) -> None:
            command(options=_taken(kind, said), **said)

        signature = inspect.Signature([*_parameters(kind), *kept])
        vars(called)["__signature__"] = signature
        called.__annotations__ = {one.name: one.annotation for one in signature.parameters.values()}
        return called

    return decorate


def _parameters(kind: type) -> Iterator[inspect.Parameter]:
    kinds, flags = get_type_hints(kind), flags_of(kind)
    for field in fields(kind):
        if is_dataclass(kinds[field.name]):
            yield from _parameters(kinds[field.name])
        elif field.name in flags:
            yield inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=_option(flags[field.name], field.default),
                annotation=kinds[field.name],
            )


def _option(flag: Flag, default: Any) -> Any:
    if not flag.name:
        return typer.Argument(default, metavar=flag.metavar, help=flag.help)
    return typer.Option(default, flag.name, metavar=flag.metavar, help=flag.help, min=flag.least)


def _taken(kind: type, said: dict[str, Any]) -> Any:
    """An instance of `kind` from its values, which leave `said`."""
    kinds, flags = get_type_hints(kind), flags_of(kind)
    inner = {
        name: _taken(one, said) for name, one in kinds.items() if isinstance(one, type) and is_dataclass(one)
    }
    return kind(**inner, **{name: said.pop(name) for name in flags})
