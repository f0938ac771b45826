"""Mechanisms switched off, one at a time: the test that guards each must fail.

    python -m tests.mutations.campaign [--only NAME] [--list] [--workers 3]

Each mutation replaces one or more pieces of source in a copy of the tree and runs there the tests that it
names, of the fast tier unless it says `slow`: of every file, folder or test that it names at least one must
fail. That one must fail again when it runs alone, and pass alone in the tree as it is: a test that fails now
and then, or anyhow, has noticed nothing. Each line names the tier that noticed the mutation, and the last
lines count by tier. What still passes guards nothing; it is listed, and the exit code is 1.
`test_mutations.py` holds that every piece is still in the source, so that a mutation cannot quietly mutate
nothing.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated, Final

import typer

ROOT: Final = Path(__file__).resolve().parents[2]
TABLE: Final = Path(__file__).with_name("mutations.toml")
LIMIT_S: Final = 600
_KEPT_OUT: Final = shutil.ignore_patterns(".venv*", ".git", "runs", "*.egg-info", ".*_cache")
_OF_SYSTEMS: Final = (
    *(f"tests/unit/{room}/" for room in ("workloads", "gateway")),
    *(f"tests/processes/{room}/" for room in ("chat", "gateway", "prompts", "goals")),
    "tests/contract/gateway/",
    "tests/learning/",
)
_OF_PROCESSES: Final = ("tests/processes/", "tests/deploy/")
PASSED: Final = 0
FAILED: Final = 1
"""pytest's exit code when tests ran and some failed: a test that could not be collected proves nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """In `file` the piece `old`, which it holds once, becomes `new`."""

    file: str
    old: str
    new: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """off: what is switched off, in words.

    With the edits made, each of `tests` must fail. slow: their tier.
    """

    name: str
    off: str
    tests: tuple[str, ...]
    edits: tuple[Edit, ...]
    slow: bool


def read_table() -> list[Mutation]:
    """Every mutation of `mutations.toml`."""
    table = tomllib.loads(TABLE.read_text())
    return [
        Mutation(
            name=name,
            off=entry["off"],
            tests=tuple(entry["tests"]),
            edits=tuple(Edit(**edit) for edit in entry["edits"]),
            slow=entry.get("slow", False),
        )
        for name, entry in table.items()
    ]


def apply(mutation: Mutation, root: Path) -> None:
    """Make the edits in the tree at `root`; raises ValueError unless each piece is there exactly once."""
    for edit in mutation.edits:
        path = root / edit.file
        text = path.read_text()
        if text.count(edit.old) != 1:
            raise ValueError(
                f"{mutation.name}: {edit.file} holds the piece {text.count(edit.old)} times: {edit.old!r}"
            )
        path.write_text(text.replace(edit.old, edit.new))


def tier_of(test: str, *, slow: bool) -> str:
    """The make target that runs a test: the tiers of the Makefile by folder."""
    if slow:
        return "test-slow"
    if f"{test}/".startswith(_OF_SYSTEMS):
        return "test-systems"
    return "test-processes" if test.startswith(_OF_PROCESSES) else "test"


class Pytest:
    """Runs tests one after another, in forks of one process that has loaded the libraries."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("forked_pytest.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, test: str, root: Path, *, slow: bool) -> tuple[int, str]:
        """Run a file, folder or test in the tree at `root` up to its first failure.

        Returns pytest's exit code, PASSED where it does not end in time, and its last line or the one that
        names the failed test.
        """
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        options = ["-q", "-x", "--no-header", "-p", "no:cacheprovider", "-m", "slow" if slow else "not slow"]
        output = root.parent / f"{root.name}.{id(self)}.log"
        wanted = {
            "root": str(root),
            "arguments": [*options, test],
            "output": str(output),
            "limit_s": LIMIT_S,
        }
        self._server.stdin.write(json.dumps(wanted) + "\n")
        self._server.stdin.flush()
        code = json.loads(self._server.stdout.readline())
        if code is None:
            return PASSED, f"no end within {LIMIT_S} s"
        lines = output.read_text(errors="replace").strip().splitlines() or [""]
        failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
        return code, (failed or lines)[-1]


def is_noticed(pytest: Pytest, test: str, mutated: Path, plain: Path, *, slow: bool) -> tuple[bool, str]:
    """Whether a test fails in the mutated tree, each time, and passes in the plain one; and its last line."""
    status, last = pytest.run(test, mutated, slow=slow)
    if status != FAILED or not last.startswith("FAILED "):
        return status == FAILED, last
    failed = last.removeprefix("FAILED ").split(" - ")[0]
    again, _ = pytest.run(failed, mutated, slow=slow)
    if again != FAILED:
        return False, f"{failed} failed once and not again"
    status, line = pytest.run(failed, plain, slow=slow)
    return (True, last) if status == PASSED else (False, f"{failed} fails without the mutation too: {line}")


def copy_tree(folder: Path) -> Path:
    """Copy the checkout with its compiled modules, which Python takes while their sources are unchanged."""
    return Path(shutil.copytree(ROOT, folder, symlinks=True, ignore=_KEPT_OUT))


def run(mutation: Mutation, plain: Path, free: SimpleQueue[Pytest]) -> tuple[list[str], set[str]]:
    """The tests that did not notice it, and the tiers that did; `plain` is a tree without mutations."""
    unnoticed, tiers, pytest = [], set(), free.get()
    with tempfile.TemporaryDirectory(prefix="mutated-") as folder:
        mutated = copy_tree(Path(folder) / "tree")
        apply(mutation, mutated)
        for test in mutation.tests:
            began = time.monotonic()
            noticed, last = is_noticed(pytest, test, mutated, plain, slow=mutation.slow)
            tier = tier_of(test, slow=mutation.slow)
            word = f"noticed by {tier}" if noticed else f"NOT NOTICED by {test} of {tier}"
            print(f"{mutation.name}: {word} in {time.monotonic() - began:.0f} s: {last}", flush=True)
            if noticed:
                tiers.add(tier)
            else:
                unnoticed.append(test)
    free.put(pytest)
    return unnoticed, tiers


def main(
    only: Annotated[list[str] | None, typer.Option(help="Names of mutations; may be repeated.")] = None,
    names: Annotated[bool, typer.Option("--list", help="Say what there is and stop.")] = False,
    workers: Annotated[int, typer.Option(min=1, help="Mutations at a time, each in its own tree.")] = 2,
) -> None:
    """Switch mechanisms off, one at a time, and see that a test fails."""
    chosen = [mutation for mutation in read_table() if not only or mutation.name in only]
    if names:
        for mutation in chosen:
            print(f"{mutation.name}: {mutation.off}")
        return
    pool, free = ThreadPoolExecutor(workers), SimpleQueue[Pytest]()
    for _ in range(workers):
        free.put(Pytest())
    with tempfile.TemporaryDirectory(prefix="plain-") as folder:
        plain = copy_tree(Path(folder) / "tree")
        try:
            results = list(pool.map(run, chosen, repeat(plain), repeat(free)))
        finally:
            pool.shutdown(cancel_futures=True)
    unnoticed = [one for one, (tests, _) in zip(chosen, results, strict=True) if tests]
    print(f"{len(chosen) - len(unnoticed)} of {len(chosen)} noticed", flush=True)
    for tier, count in sorted(Counter(tier for _, tiers in results for tier in tiers).items()):
        print(f"  by {tier}: {count}")
    for mutation in unnoticed:
        print(f"not noticed by all of its tests: {mutation.name}")
    raise typer.Exit(1 if unnoticed or not chosen else 0)


if __name__ == "__main__":
    typer.run(main)
