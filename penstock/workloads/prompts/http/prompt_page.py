"""The page of one prompt: `/prompts`, a few files that call the API like any other program."""

from pathlib import Path
from typing import Final

from fastapi import APIRouter, Response

from penstock.gateway.surface import console_file, file_answer

page_router = APIRouter(include_in_schema=False)

_FILES: Final = {file.name: file for file in (Path(__file__).parent / "static").iterdir()}
_OF_CONSOLE: Final = frozenset({"console.css", "elements.js", "icon.svg"})


class Page(Response):
    """The page itself."""

    media_type = "text/html"


@page_router.get("/prompts", response_class=Page)
async def page() -> Page:
    """Return the page."""
    return Page(_FILES["index.html"].read_bytes())


@page_router.get("/prompts/{file}", response_class=Response)
async def file_of_page(file: str) -> Response:
    """Return a file of the page."""
    return console_file(file) if file in _OF_CONSOLE else file_answer(_FILES, file)
