"""Satisfaction over days and people on the page of the chat, in a real browser.

With PENSTOCK_SCREENSHOTS=FOLDER it leaves a picture there.
"""

from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("argon2", reason="the gateway needs its extra")

from penstock.registry.ratings import Rating
from penstock.registry.registry import Registry
from penstock.workloads.chat.http.chat_api import AnswerBook
from tests.support.browser.tabs import check_look, chromium, expect, needs_chromium, open_tab
from tests.support.chat.chat_stand import chat_app, page_of, upstream_of
from tests.support.language.text_stand import make_model

pytestmark = [needs_chromium, pytest.mark.timeout(600)]

DAY_S = 86_400.0
FIRST_S = 20_000 * DAY_S  # 2024-10-04
PEOPLE = 40


def have_talked(folder: Path) -> None:
    """Forty people had a conversation on each of two days; all liked the second, and ten liked the first.

    One of them is known by an account, had a third one, and rated nothing but that on the first day.
    """
    book, said = AnswerBook(folder / "state"), list[Rating]()
    for number in range(PEOPLE):
        person = "user/7" if number == 0 else f"{number:02}-a-browsers-own-name"
        for day in (0, 1):
            name = f"talk-{number}-{day}"
            book.note(name, 0, 1, fallback=False, person=person, at_s=FIRST_S + day * DAY_S)
            if number > 0 or day == 0:
                liked = day == 1 or number < 10
                said.append(
                    Rating(
                        prompt="hello",
                        response="hello",
                        score=1.0 if liked else -1.0,
                        key="thumb",
                        source="chat",
                        conversation=name,
                        version=1,
                        rater=person,
                    )
                )
    book.note("talk-0-2", 0, 1, fallback=False, person="user/7", at_s=FIRST_S)
    with Registry.open(f"sqlite:///{folder / 'registry.sqlite'}") as registry:
        registry.add_ratings("default", said)


def test_operators_see_satisfaction_by_day_and_person(tmp_path: Path, short_folder: Path) -> None:
    complaints: list[str] = []
    with ExitStack() as stack:
        run = stack.enter_context(upstream_of(make_model(tmp_path / "base"), tmp_path, short_folder / "t"))
        have_talked(tmp_path)
        url = stack.enter_context(page_of(chat_app(run, {}, None)))
        browser = stack.enter_context(chromium())
        tab = open_tab(browser, url, complaints, "/chat")
        tab.get_by_role("link", name="Look after").press("Enter")
        table = tab.get_by_role("region", name="Satisfaction by day (UTC) and by person")
        rows = table.get_by_role("row")
        expect(rows).to_have_count(1 + 2 + 20)
        expect(rows.nth(1)).to_contain_text("2024-10-05")
        expect(rows.nth(1)).to_contain_text("98 % (87 % to 100 %)")  # 39 of 40
        expect(rows.nth(2)).to_contain_text("24 % (14 % to 39 %)")  # 10 of 41
        expect(rows.nth(3)).to_contain_text("user/7")
        expect(rows.nth(4)).to_contain_text("-a-b…")
        expect(table).not_to_contain_text("browsers-own-name")
        check_look(tab, "chat-days")
        expect(tab.locator("#notice")).to_be_empty()
    assert complaints == []
