"""Options of every front that speaks HTTP: under which names it is reached, and whose pages may call."""

from typing import Annotated

import typer

HostNames = Annotated[
    list[str] | None,
    typer.Option("--host", help="Name by which it is reached, beside loopback; may be repeated."),
]
Origins = Annotated[
    list[str] | None,
    typer.Option("--origin", metavar="URL", help="Pages of this origin may call; may be repeated."),
]
Proxies = Annotated[
    list[str] | None,
    typer.Option(
        "--proxy",
        metavar="ADDRESS",
        help="Proxy, or network of them, that says who calls (X-Forwarded-For); may be repeated.",
    ),
]
