"""Signing in at a provider of identities, in a real browser: there, back, and the page knows who it is."""

import socket
from pathlib import Path

import pytest

pytest.importorskip("argon2", reason="the gateway needs its extra")
pytest.importorskip("oidc_provider_mock", reason="a provider for tests, of the extra test-people")
from tests.processes.gateway.test_gateway_process import PASSWORD, operator
from tests.support.browser.tabs import chromium, needs_chromium
from tests.support.gateway.identity_provider import identity_provider
from tests.support.run.harness import PATIENCE_S, GatewayProcess

pytestmark = [needs_chromium, pytest.mark.timeout(300)]


def free_port() -> int:
    """A port that is free now: the gateway's own address stands in a file before it starts."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_a_person_signs_in_at_the_provider_and_another_is_told_what_is_lacking(tmp_path: Path) -> None:
    done = operator(tmp_path, "user", "add", "owner", "--project", "alpha", stdin=f"{PASSWORD}\n")
    assert done.returncode == 0, done.stderr
    listen = f"127.0.0.1:{free_port()}"
    (tmp_path / "secret").write_text("of the client")
    (tmp_path / "secret").chmod(0o600)
    with identity_provider() as provider, chromium() as browser:
        (tmp_path / "oidc.toml").write_text(
            f'issuer = "{provider.issuer}"\nclient_id = "penstock"\nclient_secret_file = "secret"\n'
            f'gateway = "http://{listen}"\ntitle = "Example"\n'
            '[domains."example.com"]\nproject = "alpha"\nrole = "editor"\n'
        )
        with GatewayProcess(tmp_path, "--oidc", "oidc.toml", "--listen", listen) as gateway:
            tab = browser.new_context().new_page()
            tab.set_default_timeout(1000 * PATIENCE_S)
            tab.goto(gateway.url)
            tab.get_by_role("button", name="Go to Example").click()
            tab.wait_for_url(f"{provider.issuer}/**")
            tab.locator("[name=sub][value=bob], button:has-text('bob')").first.click()
            tab.get_by_role("alert").get_by_text("You have no account here").wait_for()
            tab.get_by_role("button", name="Go to Example").click()
            tab.wait_for_url(f"{provider.issuer}/**")
            tab.locator("[name=sub][value=alice], button:has-text('alice')").first.click()
            tab.get_by_text("alice, editor of alpha").wait_for()
            assert "code" not in tab.url
            assert tab.evaluate("document.cookie") == ""
            tab.reload()
            tab.get_by_text("alice, editor of alpha").wait_for()
