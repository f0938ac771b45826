"""The application over one run, and what the gateway is told of it."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from fastapi import FastAPI

from penstock.gateway.frame.api_errors import add_handlers as add_error_handlers
from penstock.gateway.frame.envelope import bare_app
from penstock.gateway.routes.console_routes import page_router
from penstock.gateway.sites.site import Loop, Site, Upstream
from penstock.workloads.chat.commands.loop_commands import check_options
from penstock.workloads.chat.http.chat_api import ChatApi
from penstock.workloads.chat.http.chat_routes import router

_PACKAGE: Final = Path(__file__).resolve().parents[3]
_OF_CONSOLE: Final = frozenset({"api.js", "console.css", "elements.js", "icon.svg"})
_TALKING: Final = ("agents", "begin", "say", "thumb", "stars", "prefer", "correct", "end", "mine", "forget")


def make_app(upstream: Upstream) -> FastAPI:
    """Return the application over a run, and over those of further agents."""

    @contextlib.asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        apis = app.state.apis = {"": ChatApi(upstream)}
        apis |= {name: ChatApi(one) for name, one in upstream.agents.items()}
        yield
        for one in apis.values():
            await one.close()

    app = bare_app("Penstock chat", life)
    app.include_router(router)
    static = Path(__file__).parent / "static"
    app.include_router(page_router("/chat", static, "chat.html", _OF_CONSOLE))
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
