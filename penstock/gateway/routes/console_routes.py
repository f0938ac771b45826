"""The console: a page for people, of a few files that call the API like any other program."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

from fastapi import APIRouter, Response

from penstock.gateway.frame.api_errors import ApiError
from penstock.gateway.frame.route_access import GuardedRoute

router = APIRouter(route_class=GuardedRoute, tags=["console"])

_TYPES: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_FILES: Final = {file.name: file for file in (Path(__file__).parent / "static").iterdir()}


class Page(Response):
    """The page itself."""

    media_type = "text/html"


@router.get("/", response_class=Page)
def page() -> Page:
    """Return the page."""
    return Page(_FILES["index.html"].read_bytes())


@router.get("/link", response_class=Page)
def link_page() -> Page:
    """Return the page on which the holder of a link rates; its secret is behind the `#` of the address."""
    return Page(_FILES["link.html"].read_bytes())


@router.get(
    "/console/{file}",
    response_class=Response,
    responses={200: {"content": {kind: {"schema": {"type": "string"}} for kind in _TYPES.values()}}},
)
def file_of_page(file: str) -> Response:
    """Return a file of the page."""
    return file_answer(_FILES, file)


def add_page(router: APIRouter, path: str, folder: Path, index: str, of_console: Collection[str]) -> None:
    """Add the routes of a page to a router: itself, and its files, some of which are the console's."""
    files = {file.name: file for file in folder.iterdir()}

    @router.get(path, response_class=Page, include_in_schema=False)
    async def page() -> Page:
        return Page(files[index].read_bytes())

    @router.get(f"{path}/{{file}}", response_class=Response, include_in_schema=False)
    async def file_of_page(file: str) -> Response:
        return file_answer(_FILES if file in of_console else files, file)


def file_answer(files: Mapping[str, Path], name: str) -> Response:
    found = files.get(name)
    if found is None:
        raise ApiError(404, "no such file of the page")
    return Response(found.read_bytes(), media_type=_TYPES[found.suffix])
