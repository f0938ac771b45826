"""Pages for people, as routes. Files are looked up by name: no path is built from what a request says."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from fastapi import APIRouter, Response

from penstock.gateway.frame.requests import ApiError

_TYPES: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def files_in(folder: Path) -> dict[str, Path]:
    """Return the files of a page in a folder, by name; others, such as licences, are left out."""
    return {file.name: file for file in folder.iterdir() if file.suffix in _TYPES}


SHARED: Final = files_in(Path(__file__).parent / "static")
"""Files that the pages have in common, by name."""


class Page(Response):
    """A document of HTML."""

    media_type = "text/html"


def add_page(router: APIRouter, path: str, file: Path, **options: Any) -> None:
    """Add a route that answers with a document. options: of the route, as FastAPI takes them."""

    def page() -> Page:
        """Return the page."""
        return Page(file.read_bytes())

    router.get(path, response_class=Page, **options)(page)


def add_files(router: APIRouter, path: str, files: Mapping[str, Path], **options: Any) -> None:
    """Add the route `PATH/NAME`, which answers with a file. options: of the route, as FastAPI takes them."""
    content = {kind: {"schema": {"type": "string"}} for kind in _TYPES.values()}

    @router.get(f"{path}/{{file}}", response_class=Response, responses={200: {"content": content}}, **options)
    def file_of_page(file: str) -> Response:
        """Return a file of the page."""
        found = files.get(file)
        if found is None:
            raise ApiError(404, "no such file of the page")
        return Response(found.read_bytes(), media_type=_TYPES[found.suffix])
