"""The tests lie where CONTRIBUTING says, so that the tests of a module are found by its name."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIERS = {
    *("abuse", "contract", "deploy", "kubernetes", "learning", "mutations", "processes", "property", "spine"),
    "unit",
}
UNIT = ROOT / "tests" / "unit"


def modules_named(test: Path) -> list[Path]:
    """What `test_a_b_c.py` may name.

    The modules a_b_c, a_b and a of its mirrored folder, or that folder itself.
    """
    folder = ROOT / test.parent.relative_to(UNIT)
    words = test.stem.removeprefix("test_").split("_")
    names = ["_".join(words[:count]) for count in range(len(words), 0, -1)]
    named = [folder / name for name in names] + [folder for name in names if name == folder.name]
    return [path for path in named if path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()]


@pytest.mark.parametrize(
    "test", sorted(UNIT.rglob("test_*.py")), ids=lambda test: str(test.relative_to(UNIT))
)
def test_every_unit_test_names_a_module(test: Path) -> None:
    """`tests/unit/ROOM/test_NAME[_TOPIC].py` is about `ROOM/NAME.py` or the package `ROOM/NAME`."""
    assert modules_named(test), (
        f"{test.relative_to(ROOT)} names no module: rename it, or move it to tests/contract"
    )


def test_every_test_is_in_a_tier() -> None:
    """What lies beside the tiers is run by no target of the Makefile."""
    tests = [path.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")]
    assert {path.parts[0] for path in tests} <= TIERS
