"""Options of a command, stated once: fields of a frozen dataclass with flag and help as annotation."""

from dataclasses import dataclass, fields
from typing import Any, get_type_hints


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """Gives a field a flag on the command line: `seed: Annotated[int, Flag(name="--seed", help="…")] = 0`.

    name: `--best`, or `--best/--newest` with a name for false; "" for an argument without a flag. least: the
    smallest number that is allowed.
    """

    name: str = ""
    help: str
    metavar: str | None = None
    least: int | None = None


def flags_of(kind: type) -> dict[str, Flag]:
    """Return the flags of a dataclass by field; fields without one are left out."""
    annotations = get_type_hints(kind, include_extras=True)
    marked = {field.name: getattr(annotations[field.name], "__metadata__", ()) for field in fields(kind)}
    return {name: flag for name, notes in marked.items() for flag in notes if isinstance(flag, Flag)}


def words(options: Any, over: Any) -> tuple[str, ...]:
    """Return the words of a command line that turn the options `over` into `options`.

    Both are of one dataclass whose flags are switches. The words may stand behind those of `over`: of two
    words about one field the last counts.
    """
    found = []
    for field, flag in flags_of(type(options)).items():
        value = getattr(options, field)
        if value != getattr(over, field):
            yes, _, no = flag.name.partition("/")
            found.append(yes if value else no or f"--no-{yes.removeprefix('--')}")
    return tuple(found)
