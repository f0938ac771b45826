import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
import typer
from typer.main import get_command

from penstock.config.algorithm_sections import SECTIONS, algorithm_sections
from penstock.config.configuration_error import DISTRIBUTION, how_to_install
from penstock.config.settings import Settings
from penstock.config.workload import find, load
from penstock.gateway.store.tables import PolicyVersionRow
from penstock.launch.cli.app import app
from penstock.protocol.refusal import Reason
from penstock.registry.models import RatingRow
from tests.abuse.test_bad_input import COMMANDS
from tests.processes.abuse.test_bad_commands import REFUSED
from tests.promises import PAGE, read_marks, read_promises, render

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def _named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _anchors(page: Path) -> set[str]:
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", prose, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=_named)
def test_every_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]*)(?:#([^)]+))?\)", page.read_text())
    dead = []
    for path, anchor in links:
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            dead.append(f"{path}#{anchor}")
    assert dead == []


@pytest.mark.parametrize("page", PAGES, ids=_named)
def test_every_file_that_is_named_exists(page: Path) -> None:
    text = page.read_text()
    folders = (
        "actor|benchmarks|broker|deploy|docs|gateway|launch|learner|penstock|protos|recipes|tests|workloads"
    )
    named = {
        *re.findall(rf"`((?:{folders})/[\w/.-]+)`", text),
        *re.findall(r"(?<![\w/.-])(?:[ab]/)?([\w-]{2,}(?:/[\w-]+)+\.(?:py|lua|proto))\b", text),
    }
    written = set(re.findall(r"^```python\n# ([\w/]+\.py)$", text, flags=re.MULTILINE))
    assert sorted(path for path in named - written if not (ROOT / path).exists()) == []


def _definitions(file: Path) -> set[str]:
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            members = (one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {f"{node.name}.{member.name}" for member in members}
    return found


@pytest.mark.parametrize("page", PAGES, ids=_named)
def test_every_function_that_is_linked_is_in_its_file(page: Path) -> None:
    links = re.findall(r"\[`([A-Za-z_][\w.]*)`\]\(([\w./-]+\.py)\)", page.read_text())
    assert [name for name, path in links if name not in _definitions(page.parent / path)] == []


def test_the_tables_of_a_service_for_agents_have_the_columns_that_are_there() -> None:
    page = (ROOT / "docs" / "rlhf-reference.md").read_text()
    for name, table in (("Feedback", RatingRow), ("PolicyVersion", PolicyVersionRow)):
        head, _, rest = page.partition(f"\n| `{name}` | ")[2].partition("\n|---|---|\n")
        assert f"`{table.__tablename__}`" in head
        rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", rest.partition("\n\n")[0], flags=re.MULTILINE))
        assert {"id", "agent_id", "created_at"} <= rows.keys()
        for ours in rows.values():
            assert set(re.findall(r"`([a-z_]+)`", ours)) <= set(table.__table__.columns.keys()), ours


@pytest.mark.parametrize("page", PAGES, ids=_named)
def test_every_diff_has_its_place(page: Path) -> None:
    diffs = re.findall(r"^```diff\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for diff in diffs:
        name, *hunks = re.split(r"^@@.*\n", diff, flags=re.MULTILINE)
        source = (ROOT / name.split("+++ b/")[1].strip()).read_text()
        old = [
            "".join(line[1:] for line in hunk.splitlines(keepends=True) if line[0] != "+") for hunk in hunks
        ]
        assert [(lines, source.count(lines)) for lines in old] == [(lines, 1) for lines in old]


@pytest.mark.parametrize("page", PAGES, ids=_named)
def test_no_paragraph_is_longer_than_130_words(page: Path) -> None:
    prose = re.sub(r"^(```.*?^```|\|.*?$)", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    paragraphs = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", prose)
    assert [paragraph for paragraph in paragraphs if len(paragraph.split()) > 130] == []


def test_the_glossary_holds_thirty_words_at_most() -> None:
    words = re.findall(r"^\| \*(.+?)\* \|", (ROOT / "docs" / "glossary.md").read_text(), flags=re.MULTILINE)
    assert 10 < len(words) <= 30
    assert words == sorted(set(words))


@pytest.mark.parametrize("page", PAGES, ids=_named)
def test_every_setting_that_is_named_exists(page: Path) -> None:
    kinds = (*SECTIONS.values(), *algorithm_sections().values())
    sections = "|".join(name for name, field in Settings.model_fields.items() if _keys(field.annotation))
    named = set(re.findall(rf"[`\s'\"](({sections})\.([a-z]\w*))(?==|`)", page.read_text()))
    unknown = [
        setting
        for setting, section, key in named
        if key not in _keys(Settings.model_fields[section].annotation)
        and (section != "algorithm" or not any(key in kind.model_fields for kind in kinds))
        and not (ROOT / section / key).is_dir()
        and not key.startswith(("json", "sqlite"))
    ]
    assert sorted(unknown) == []


def _keys(section: object) -> Mapping[str, object]:
    fields: Mapping[str, object] = getattr(section, "model_fields", {})
    return fields


def test_every_promise_names_a_test_that_shows_it() -> None:
    keys = [key for section in read_promises().values() for key in section]
    assert len(keys) == len(set(keys))
    assert set(keys) == set(read_marks())
    assert render() == PAGE.read_text(), "make the page anew: python -m tests.promises"


@pytest.mark.parametrize("reason", Reason)
def test_every_refusal_is_explained(reason: Reason) -> None:
    assert f"\n| `{reason.name}` | " in (ROOT / "docs" / "operations.md").read_text()


def test_every_make_target_is_in_the_pages() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    pages = "\n".join(page.read_text() for page in PAGES)
    assert {target for target in targets if f"make {target}" not in pages} == {"dashboards", "dist"}


@pytest.mark.timeout(600)
def test_the_reference_matches_the_program() -> None:
    command = [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


NUMBER: Final = re.compile(r"(?<![\w.,-])\d[\d,]*(?:\.\d+)?(?![\w-])")
"""Not the digits of a name, such as Stable-Baselines3."""
WORDS: Final = ("no", "one", "two", "three", "four", "five", "six")


Figure = tuple[str, int, int]
"""A row of docs/performance.md by its beginning, a column, and which of the numbers there."""
SHELL: Final = "CartPole-v1, seconds from the shell until 475"
TRAINING: Final = "CartPole-v1, training seconds until 475"
STEPS: Final = "CartPole-v1, steps/s"
LARGE: Final = "large fragments, actor to learner"
PATH: Final = "path, 64 KiB / 512 KiB / 2 MiB"
ACTIONS: Final = "actions, 64 calls in flight"
SOURCES: Final[dict[str, Sequence[Figure | tuple[Figure, Figure]]]] = {
    "CartPole-v1 from the shell": (
        (SHELL, 1, 0), (TRAINING, 1, 0), (SHELL, 2, 0), (TRAINING, 2, 0), (SHELL, 2, 1), (TRAINING, 2, 1),
    ),
    "CartPole-v1, steps per second": ((STEPS, 1, 0), (STEPS, 2, 0), (STEPS, 2, 2)),
    "experience from actor to learner": (
        (LARGE, 1, 0), (LARGE, 1, 2), ((LARGE, 1, 0), (PATH, 3, 0)), ((LARGE, 1, 2), (PATH, 3, 2)),
    ),
    "actions from a policy server": ((ACTIONS, 1, 0), ("actions, one client alone", 1, 0), (ACTIONS, 2, 0)),
}  # fmt: skip
"""Where the numbers of each row of the README come from, in their order; of two figures their ratio."""


def _section(page: str, heading: str) -> str:
    text = (ROOT / page).read_text()
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def _rows(text: str) -> list[list[str]]:
    lines = re.findall(r"^\|(.+)\|$", text, flags=re.MULTILINE)
    return [[cell.strip() for cell in line.split("|")] for line in lines]


def _numbers(text: str) -> list[tuple[float, float]]:
    """Each number with the unit of its last digit that is not a trailing zero of a whole number."""
    found = []
    for match in NUMBER.findall(text):
        digits = match.replace(",", "")
        zeros = len(digits) - len(digits.rstrip("0")) if "." not in digits else 0
        unit = 10.0**zeros if "." not in digits else 10.0 ** -len(digits.partition(".")[2])
        found.append((float(digits), unit))
    return found


def _value(source: Figure | tuple[Figure, Figure]) -> float:
    if len(source) == 2:
        return _value(source[0]) / _value(source[1])
    beginning, column, index = source
    rows = _rows((ROOT / "docs" / "performance.md").read_text())
    (row,) = [row for row in rows if row[0].startswith(beginning)]
    return _numbers(row[column])[index][0]


def test_the_figures_of_the_readme_are_those_of_the_page() -> None:
    _, _, *rows = _rows(_section("README.md", "How fast"))
    assert len(rows) == len(SOURCES)
    for (name, *cells), (known, sources) in zip(rows, SOURCES.items(), strict=True):
        assert name.startswith(known)
        told, expected = _numbers(" ".join(cells)), [_value(source) for source in sources]
        assert len(told) == len(expected)
        wrong = [one for one in zip(told, expected, strict=True) if abs(one[0][0] - one[1]) > one[0][1] / 2]
        assert wrong == [], name


def test_the_readme_names_the_missed_aims() -> None:
    text = " ".join(_section("README.md", "How fast").split())
    bars = {row[0]: row for row in _rows(_section("docs/performance.md", "Bars"))}
    steps = bars["steps/s of CartPole-v1"]
    assert f"{float(steps[3]):.1f} times the steps per second of the fastest other" in text
    assert f"instead of {steps[2]} times" in text
    verdicts = ", ".join((bars[PATH][4], bars["the same with the append-only file"][4])).split(", ")
    missed = sum(verdict.startswith("missed") for verdict in verdicts)
    assert f"{WORDS[missed]} of the {WORDS[len(verdicts)]} aims for the way from actor to learner" in text


if TYPE_CHECKING:
    from penstock.gateway.application import Service
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, SETUPTOOLS = PYPROJECT["project"], PYPROJECT["tool"]["setuptools"]
ROOMS = ("actor", "benchmarks", "broker", "deploy", "examples", "learner", "penstock")
INSTALLATION_PAGES = [
    page
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*Dockerfile")]
    if page.name != "CHANGELOG.md"
]
INSTALLATION_SOURCES = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
COMMAND = re.compile(r"pip\s+install\s+((?:-\S+\s+)*)['\"]?((?:\.|penstock[\w-]*)(?:\[[^\]]*\])?)(?![\w/])")
REMEDY = re.compile(r"how_to_install\(['\"]([\w-]+)['\"]\)")


def ours(text: str) -> list[str]:
    """Requirements of the `pip install` commands in a text that name a checkout or a `penstock…`."""
    return [match[2] for match in COMMAND.finditer(text)]


def test_the_distribution_has_its_own_name() -> None:
    assert PROJECT["name"] == DISTRIBUTION
    assert PROJECT["scripts"].keys() == {"penstock"}
    own = re.findall(r"penstock[\w-]*(?=\[)", str(PROJECT["optional-dependencies"]))
    assert set(own) == {DISTRIBUTION}


@pytest.mark.parametrize("name", ["chat", "prompts"])
def test_the_extra_of_a_site_installs_what_the_site_starts(name: str) -> None:
    pytest.importorskip("argon2", reason="the gateway needs its extra")
    site: Service = load(find(name).site)()
    found = SETUPTOOLS["packages"]["find"]["include"]
    folder = site.recipe.parent.relative_to(ROOT)
    assert any(fnmatch(".".join(folder.parts), pattern) for pattern in found)
    assert any(site.recipe.match(pattern) for pattern in SETUPTOOLS["package-data"]["*"])


def test_every_install_command_installs_this_program() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {requirement}"
        for path in [*INSTALLATION_PAGES, *INSTALLATION_SOURCES]
        for requirement in ours(path.read_text())
        if requirement.partition("[")[0] not in {".", DISTRIBUTION}
    ]
    assert wrong == []


def test_pages_name_both_ways_to_install() -> None:
    for page in INSTALLATION_PAGES:
        found = ours(page.read_text())
        if any(requirement.startswith(DISTRIBUTION) for requirement in found):
            assert any(requirement.startswith(".") for requirement in found), page
    assert sum(len(ours(page.read_text())) for page in INSTALLATION_PAGES) > 8


def test_every_extra_that_is_named_exists() -> None:
    known = set(PROJECT["optional-dependencies"])
    named = {
        extra.strip()
        for path in INSTALLATION_PAGES
        for requirement in ours(path.read_text())
        for extra in requirement.partition("[")[2].rstrip("]").split(",")
        if extra and not extra.startswith("$")
    }
    named = {re.sub(r"\$\{.*", "", extra) for extra in named}
    remedies = {extra for path in INSTALLATION_SOURCES for extra in REMEDY.findall(path.read_text())}
    assert {"ui", "onnx", "rlhf", "postgresql"} <= remedies
    assert (named | remedies) - known == set()


@pytest.mark.parametrize("extra", ["ui", "rlhf"])
def test_a_remedy_names_both_ways_to_install(extra: str) -> None:
    assert ours(how_to_install(extra)) == [f".[{extra}]", f"{DISTRIBUTION}[{extra}]"]


def test_every_call_states_what_it_can_make_grow() -> None:
    protos = (ROOT / "protos" / "penstock" / "v1").glob("*.proto")
    calls = {
        name for path in protos for name in re.findall(r"^\s*rpc (\w+)\(", path.read_text(), re.MULTILINE)
    }
    page = (ROOT / "SECURITY.md").read_text()
    table = page.split("| call | what grows | until |\n", 1)[1].split("\n\n", 1)[0]
    named = [name for row in table.splitlines()[1:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(named) == sorted(calls)


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
