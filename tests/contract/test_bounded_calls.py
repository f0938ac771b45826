"""SECURITY.md says of every call what it can make a server keep."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_call_says_what_it_can_make_grow() -> None:
    protos = (ROOT / "protos" / "penstock" / "v1").glob("*.proto")
    calls = {
        name for path in protos for name in re.findall(r"^\s*rpc (\w+)\(", path.read_text(), re.MULTILINE)
    }
    page = (ROOT / "SECURITY.md").read_text()
    table = page.split("| call | what grows | until |\n", 1)[1].split("\n\n", 1)[0]
    named = [name for row in table.splitlines()[1:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(named) == sorted(calls)
