"""Where a process finds what it proves itself with."""

from pathlib import Path

import pytest

from penstock.config.credentials import registry_with_password
from penstock.config.settings import ConfigurationError, RegistrySection


def test_the_registry_s_password_comes_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("a/b@c:d \n")
    section = RegistrySection(url="postgresql://penstock@db:5432/versions", password_file=file)
    assert registry_with_password(section) == "postgresql://penstock:a%2Fb%40c%3Ad@db:5432/versions"


def test_without_a_file_the_url_is_what_it_was(tmp_path: Path) -> None:
    url = "postgresql://penstock@db/versions"
    assert registry_with_password(RegistrySection(url=url)) == url
    assert registry_with_password(RegistrySection(password_file=tmp_path / "absent")) == ""


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("postgresql://penstock@db/versions", "registry.password_file=.*absent: No such file"),
        ("sqlite:////tmp/registry.sqlite", "only a postgresql:// registry has a password; leave it out"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, url: str, message: str) -> None:
    section = RegistrySection(url=url, password_file=tmp_path / "absent")
    with pytest.raises(ConfigurationError, match=message):
        registry_with_password(section)
