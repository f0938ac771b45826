"""The application over one run, and what the gateway is told of it."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from fastapi import APIRouter, FastAPI, Response

from penstock import __version__
from penstock.gateway.frame.api_errors import add_handlers as add_error_handlers
from penstock.gateway.routes.console_routes import Page, console_file, file_answer
from penstock.gateway.sites.site import Loop, Site, Upstream
from penstock.workloads.chat.commands.loop_commands import check_options
from penstock.workloads.chat.http.chat_api import ChatApi
from penstock.workloads.chat.http.chat_routes import router

_PACKAGE: Final = Path(__file__).resolve().parents[3]
_FILES: Final = {file.name: file for file in (Path(__file__).parent / "static").iterdir()}
_OF_CONSOLE: Final = frozenset({"api.js", "console.css", "elements.js", "icon.svg"})
_TALKING: Final = ("agents", "begin", "say", "thumb", "stars", "prefer", "correct", "end", "mine", "forget")

page_router = APIRouter(include_in_schema=False)


@page_router.get("/chat", response_class=Page)
async def page() -> Page:
    """Return the page."""
    return Page(_FILES["chat.html"].read_bytes())


@page_router.get("/chat/{file}", response_class=Response)
async def file_of_page(file: str) -> Response:
    """Return a file of the page."""
    return console_file(file) if file in _OF_CONSOLE else file_answer(_FILES, file)


def make_app(upstream: Upstream) -> FastAPI:
    """Return the application over a run, and over those of further agents."""

    @contextlib.asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        apis = app.state.apis = {"": ChatApi(upstream)}
        apis |= {name: ChatApi(one) for name, one in upstream.agents.items()}
        yield
        for one in apis.values():
            await one.close()

    app = FastAPI(
        title="Penstock chat",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        lifespan=life,
    )
    app.include_router(router)
    app.include_router(page_router)
    add_error_handlers(app)
    return app


def site() -> Site:
    """Return what the workload answers with under an address of its own.

    Beyond loopback a viewer's token suffices to talk and to rate; the overview needs an editor's.
    """
    return Site(
        recipe=_PACKAGE / "recipes" / "chat-tiny.toml",
        settings=(),
        make_app=make_app,
        open_paths=("/health", "/chat"),
        takes_agents=True,
        page="/chat",
        viewer_paths=frozenset(f"/api/chat/{name}" for name in _TALKING),
        loop=Loop(
            words=("chat", "loop", "run"),
            # So that there is a version, the one that it begins with, against which canaries are judged.
            settings=("learner.keep_every_updates=1000",),
            options=("--reward=learning_rate=3e-3",),  # of the small model that the recipe makes
            check=check_options,
        ),
    )
