import ast
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from penstock.config.algorithm_sections import SECTIONS, algorithm_sections
from penstock.config.settings import Settings
from penstock.gateway.store.tables import PolicyVersionRow
from penstock.protocol.refusal import Reason
from penstock.registry.models import RatingRow
from tests.promises import PAGE, read_marks, read_promises, render

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def _named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
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
    """Functions and classes of a file, and methods as Class.method."""
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


def test_the_table_of_where_to_look_first_answers_each_question_with_a_place() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.partition("\n## Where to look first\n")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| (.+?)\? \| (.+) \|$", table, flags=re.MULTILINE))
    assert [question for question, answer in rows.items() if "`" not in answer and "](" not in answer] == []
    for asked in ("admitted", "clipped", "published", "staleness", "algorithm added", "canary judged"):
        assert any(asked in question for question in rows), asked


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


def test_every_promise_is_shown_by_a_test_and_the_page_says_which() -> None:
    keys = [key for section in read_promises().values() for key in section]
    assert len(keys) == len(set(keys))
    assert set(keys) == set(read_marks())
    assert render() == PAGE.read_text(), "make the page anew: python -m tests.promises"


@pytest.mark.parametrize("reason", Reason)
def test_every_refusal_is_explained(reason: Reason) -> None:
    assert f"\n| `{reason.name}` | " in (ROOT / "docs" / "operations.md").read_text()


@pytest.mark.parametrize(
    "target",
    [
        "train",
        "test",
        "test-processes",
        "test-systems",
        "test-slow",
        "soak",
        "mutations",
        "learn",
        "check",
        "bench",
        "protos",
    ],
)
def test_every_make_target_is_in_the_pages(target: str) -> None:
    assert f"\n{target}:" in (ROOT / "Makefile").read_text()
    assert any(f"make {target}" in page.read_text() for page in PAGES)


@pytest.mark.timeout(600)
def test_the_reference_is_what_the_program_is() -> None:
    command = [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
