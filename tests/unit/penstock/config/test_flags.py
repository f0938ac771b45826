"""What a command line says of options."""

from dataclasses import dataclass
from typing import Annotated

import pytest

from penstock.config.flags import Flag, flags_of, words


@dataclass(frozen=True, kw_only=True)
class Options:
    """Two switches, and a field that is no option."""

    loud: Annotated[bool, Flag(name="--loud", help="Shout.")] = False
    best: Annotated[bool, Flag(name="--best/--newest", help="Which one.")] = False
    inner: int = 0


def test_the_fields_with_a_flag_are_options() -> None:
    assert {name: flag.name for name, flag in flags_of(Options).items()} == {
        "loud": "--loud",
        "best": "--best/--newest",
    }


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (Options(), Options(), ()),
        (Options(), Options(loud=True, best=True), ("--loud", "--best")),
        (Options(best=True), Options(loud=True), ("--loud", "--newest")),
        (Options(loud=True), Options(), ("--no-loud",)),
        (Options(best=True), Options(best=True, inner=3), ()),
    ],
)
def test_only_what_differs_is_said(before: Options, after: Options, expected: tuple[str, ...]) -> None:
    assert words(after, over=before) == expected
