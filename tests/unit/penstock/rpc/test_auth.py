"""What a process proves itself with."""

from pathlib import Path

import pytest

from penstock.rpc.auth import Credentials


def test_a_certificate_needs_its_key(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give both or neither"):
        Credentials.from_files(insecure=False, certificate=tmp_path / "c.pem", key=None, authority=None)


def test_a_key_is_never_shown() -> None:
    assert "secret" not in repr(Credentials(certificate=b"c", key=b"secret"))
