"""The client of a server of text: made when it is asked for, and anew where the run's server has moved."""

import asyncio
from pathlib import Path

import pytest

from penstock.client import Unreachable
from penstock.gateway.upstream import RunAddresses, ServedText, Upstream
from penstock.rpc.auth import Credentials
from tests.support.language.text_address import served_text
from tests.support.language.text_stand import make_model
from tests.support.run.broker_process import eventually


class Run:
    """A run whose server moves. upstream: as a site is told of it."""

    def __init__(self, server: str) -> None:
        self.server = server
        self.upstream = Upstream(
            addresses=lambda: RunAddresses(server=self.server), credentials=Credentials()
        )


def test_it_follows_the_run(tmp_path: Path) -> None:
    run, moves = Run(""), list[str]()
    served = ServedText(run.upstream, moved=lambda: moves.append(run.server))
    model, socket = make_model(tmp_path / "model"), tmp_path / "text.sock"
    with asyncio.Runner() as loop, served_text(model, socket, policy="talker"):
        assert loop.run(served.client()) is None
        run.server = f"unix:{socket}"
        client = loop.run(served.client())
        assert client is not None
        assert loop.run(client.describe()).policy == "talker"
        assert loop.run(served.client()) is client
        run.server = f"unix:{tmp_path / 'other.sock'}"
        eventually(lambda: loop.run(served.client()) is not client, "the move")
        other = loop.run(served.client())
        assert other is not None
        with pytest.raises(Unreachable, match=r"other\.sock"):
            loop.run(other.describe())
        loop.run(served.close())
    assert moves == [f"unix:{socket}", run.server, run.server]
