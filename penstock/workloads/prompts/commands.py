"""`penstock prompts`: what the workload adds to the command line."""

from typing import TYPE_CHECKING, Annotated

import typer

from penstock.runtime.foreground import Foreground, unfolded

if TYPE_CHECKING:
    from penstock.config.settings import Settings
    from penstock.runtime.lifecycle import Lifecycle

prompt_commands = typer.Typer(help="Prompts: embeddings of a sentence model.", no_args_is_help=True)


@prompt_commands.callback()
def _group() -> None:
    """Keep the command a group while it has a single member."""


@prompt_commands.command()
@unfolded
def embeddings(
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Of this machine only; port 0: a free one.")
    ] = "127.0.0.1:8766",
    *,
    foreground: Foreground,
) -> None:
    """Serve embeddings of MiniLM (extra `data`) at /v1/embeddings, in OpenAI's form."""

    def body(lifecycle: "Lifecycle", settings: "Settings") -> int:
        from penstock.workloads.prompts.embedding_server import main

        return main(lifecycle, listen=listen, threads=settings.actor.threads)

    foreground.run("embeddings", body)
