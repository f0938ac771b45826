"""A name is one version of a policy, for good."""

from pathlib import Path

import pytest

from penstock.registry.records import NewVersion, NotAllowed, Origin, UnknownVersion
from penstock.registry.registry import Registry
from tests.support.storage.ready_tables import with_registry


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    """With two versions of one policy, and one of another."""
    opened = Registry.open(with_registry(f"sqlite:///{tmp_path}/registry.sqlite"), migrate=True)
    for policy, version in (("a", 3), ("a", 8), ("b", 5)):
        new = NewVersion(
            policy=policy,
            version=version,
            run="r",
            update=1,
            sha256="0" * 64,
            size_bytes=1,
            origin=Origin.FINAL,
        )
        opened.register(new, by="test")
    return opened


def test_a_version_is_found_by_its_name(registry: Registry) -> None:
    registry.name("a", 3, "v15")
    registry.name("a", 3, "v15")
    registry.name("a", 8, "v20.2")
    registry.name("b", 5, "v15")
    assert registry.number("a", "v15") == 3
    assert registry.labels("a") == registry.arms("a").labels == {"v15": 3, "v20.2": 8}
    assert registry.labels("c") == {}
    with pytest.raises(UnknownVersion, match="is called 'v99'"):
        registry.number("a", "v99")


def test_a_name_stays_with_its_version(registry: Registry) -> None:
    registry.name("a", 3, "v15")
    with pytest.raises(NotAllowed, match="is that of version 3"):
        registry.name("a", 8, "v15")
    with pytest.raises(UnknownVersion):
        registry.name("a", 4, "v16")
    assert registry.labels("a") == {"v15": 3}


@pytest.mark.parametrize("label", ["", "15", "1v", "latest", "active", "v 1", "v/1", "ö", "v" * 64, "v1\n"])
def test_what_would_be_taken_for_something_else_is_no_name(registry: Registry, label: str) -> None:
    with pytest.raises(ValueError, match="label="):
        registry.name("a", 3, label)
