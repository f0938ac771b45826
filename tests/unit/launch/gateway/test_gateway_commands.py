"""`penstock gateway` where its extra is absent."""

import sys

import pytest
from typer.testing import CliRunner

from launch.cli.app import app


@pytest.mark.parametrize("words", [("gateway",), ("gateway", "user", "add", "ann", "--project", "p")])
def test_without_its_extra_there_is_no_gateway(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit 2 with what is absent and how it is installed."""
    monkeypatch.setitem(sys.modules, "jwt", None)
    reply = CliRunner().invoke(app, words)
    assert reply.exit_code == 2
    assert "no gateway without " in reply.stderr
    assert "jwt" in reply.stderr
    assert "penstock-rl[gateway]" in reply.stderr
