"""The file that names a provider: what is wrong in it is named, before anything is served."""

from pathlib import Path

import pytest

pytest.importorskip("jwt", reason="the gateway needs its extra")

from penstock.config.configuration_error import ConfigurationError
from penstock.gateway.accounts.oidc import read_provider
from penstock.gateway.store.tables import Role

WHOLE = """
issuer = "https://accounts.example"
client_id = "penstock"
client_secret_file = "secret"
gateway = "https://gateway.example/"
[domains."Example.com"]
project = "alpha"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the secret of the client."""
    (tmp_path / "secret").write_text("of the client\n")
    (tmp_path / "secret").chmod(0o600)
    return tmp_path


def test_a_whole_file_is_read(folder: Path) -> None:
    (folder / "oidc.toml").write_text(WHOLE)
    found = read_provider(folder / "oidc.toml")
    assert (found.client_secret, "of the client" in repr(found)) == ("of the client", False)
    assert found.redirect == "https://gateway.example/api/auth/oidc/callback"
    assert found.domains["example.com"].role is Role.VIEWER


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("https://accounts", "http://accounts", "issuer: use https"),
        ("https://gateway", "http://gateway", "gateway: use https"),
        ('client_id = "penstock"', "", "client_id"),
        ('client_id = "penstock"', 'client_id = ""', "client_id"),
        ('client_id = "penstock"', "client_id = ", "cannot be read as TOML"),
        ('"secret"', '"absent"', "client_secret_file='.*absent': .*cannot be read"),
        ('project = "alpha"', 'project = "No Project"', "Example.com.project"),
        ('project = "alpha"', 'project = "alpha"\nrole = "owner"', "role: viewer or editor"),
        ('project = "alpha"', 'project = "alpha"\nmore = 1', "more"),
    ],
)
def test_what_is_wrong_is_named(folder: Path, old: str, new: str, told: str) -> None:
    (folder / "oidc.toml").write_text(WHOLE.replace(old, new))
    with pytest.raises(ConfigurationError, match=told):
        read_provider(folder / "oidc.toml")


def test_a_secret_that_others_may_read_is_refused(folder: Path) -> None:
    (folder / "oidc.toml").write_text(WHOLE)
    (folder / "secret").chmod(0o644)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        read_provider(folder / "oidc.toml")
