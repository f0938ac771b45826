"""Passwords are kept as hashes that are dear to guess."""

import pytest

pytest.importorskip("argon2", reason="the gateway needs its extra")

from penstock.gateway.accounts.users import hash_password, is_password


def test_a_hash_takes_64_mib_and_is_that_of_its_password_alone() -> None:
    encoded = hash_password("correct horse battery", name="ada")
    assert encoded.startswith("$argon2id$v=19$m=65536,t=3,p=4$")
    assert is_password(encoded, "correct horse battery")
    assert not is_password(encoded, "correct horse batterz")
    assert not is_password(None, "correct horse battery")


@pytest.mark.parametrize("kept", ["", "-", "plain text", "$argon2id$", "$argon2id$v=19$m=65536,t=3,p=4$x$y"])
def test_what_is_no_hash_is_no_password(kept: str) -> None:
    assert not is_password(kept, kept)
    assert not is_password(kept, "correct horse battery")
