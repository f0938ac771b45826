"""Access tokens that this installation did not sign, or not so, count for nothing."""

import base64
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

jwt = pytest.importorskip("jwt", reason="the gateway needs its extra")

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # noqa: E402
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat  # noqa: E402

from penstock.config.configuration_error import ConfigurationError  # noqa: E402
from penstock.gateway.accounts.sessions import BadToken, Keys, make_keys, read_keys  # noqa: E402

NOW = datetime(2026, 11, 24, tzinfo=UTC)
CLAIMS: dict[str, Any] = {"sub": "user/a", "aud": "here", "iat": NOW, "exp": NOW + timedelta(minutes=15)}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of keys."""
    make_keys(tmp_path / "keys.json")
    return tmp_path / "keys.json"


@pytest.fixture
def keys(file: Path) -> Keys:
    """The keys of it."""
    return read_keys(file)


def refused(keys: Keys, token: str, now: datetime = NOW) -> bool:
    """Whether a token counts for nothing."""
    try:
        keys.verify(token, now, audience="here")
    except BadToken:
        return True
    return False


def part(value: dict[str, Any]) -> str:
    """A part of a token, as JWT encodes it."""
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


def test_what_was_signed_is_verified_until_it_expires(keys: Keys) -> None:
    token = keys.sign(CLAIMS)
    assert keys.verify(token, NOW, audience="here")["sub"] == "user/a"
    assert not refused(keys, token, NOW + timedelta(minutes=15, seconds=-1))
    assert refused(keys, token, NOW + timedelta(minutes=15))


def test_forged_tokens_are_refused(keys: Keys, tmp_path: Path) -> None:
    good = keys.sign(CLAIMS)
    header, claims, signature = good.split(".")
    assert not refused(keys, good)
    plain = {**CLAIMS, "iss": "penstock-gateway", "iat": 1, "exp": int(NOW.timestamp()) + 900}
    kid = {"kid": keys.signing, "typ": "at+jwt"}
    public = keys.private[keys.signing].public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    pem = keys.private[keys.signing].public_key()
    forged = {
        "alg none": f"{part({**kid, 'alg': 'none'})}.{part(plain)}.",
        "alg none, signed": f"{part({**kid, 'alg': 'none'})}.{claims}.{signature}",
        "alg None": f"{part({**kid, 'alg': 'None'})}.{part(plain)}.",
        "no signature": f"{header}.{claims}.",
        "changed": f"{header}.{part({**plain, 'sub': 'user/b'})}.{signature}",
        "another key": jwt.encode(plain, Ed25519PrivateKey.generate(), algorithm="EdDSA", headers=kid),
        "public key as secret": jwt.encode(plain, public, algorithm="HS256", headers=kid),
        "no kid": jwt.encode(plain, keys.private[keys.signing], algorithm="EdDSA"),
        "kid of none": jwt.encode(plain, keys.private[keys.signing], algorithm="EdDSA", headers={"kid": "x"}),
        "another type": jwt.encode(
            plain, keys.private[keys.signing], algorithm="EdDSA", headers={**kid, "typ": "JWT"}
        ),
        "another audience": keys.sign({**CLAIMS, "aud": "there"}),
        "another issuer": jwt.encode(
            {**plain, "iss": "x"}, keys.private[keys.signing], algorithm="EdDSA", headers=kid
        ),
        "no expiry": jwt.encode(
            {k: v for k, v in plain.items() if k != "exp"},
            keys.private[keys.signing],
            algorithm="EdDSA",
            headers=kid,
        ),
        "expiry as text": jwt.encode(
            {**plain, "exp": "9999999999"}, keys.private[keys.signing], algorithm="EdDSA", headers=kid
        ),
        "too long": good + "A" * 5000,
        "nothing": "",
        "dots": "...",
        "not text": "\udcff.a.b",
    }
    assert pem is not None
    assert [name for name, token in forged.items() if not refused(keys, token)] == []


def test_keys_are_rotated_by_one_in_front(file: Path) -> None:
    old = read_keys(file)
    token = old.sign(CLAIMS)
    make_keys(file.with_name("new.json"))
    content, fresh = json.loads(file.read_text()), json.loads(file.with_name("new.json").read_text())
    content["keys"].insert(0, fresh["keys"][0])
    file.write_text(json.dumps(content))
    both = read_keys(file)
    assert both.signing != old.signing
    assert not refused(both, token)
    assert both.pseudonym("rater", "alpha", "ada") == old.pseudonym("rater", "alpha", "ada")
    content["keys"].pop()
    file.write_text(json.dumps(content))
    assert refused(read_keys(file), token)


def test_the_file_is_made_once_and_for_its_owner_alone(file: Path) -> None:
    before = file.read_text()
    make_keys(file)
    assert file.read_text() == before
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in file.parent.iterdir()] == ["keys.json"]


@pytest.mark.parametrize("content", ["", "{}", '{"keys": []}', '{"keys": [{"kid": "a", "private": "!"}]}'])
def test_a_file_that_is_no_file_of_keys_is_refused(file: Path, content: str) -> None:
    file.write_text(content)
    with pytest.raises(ConfigurationError, match=r"--keys .*keys\.json: not a file of keys"):
        read_keys(file)


def test_a_file_that_others_may_read_is_refused(file: Path) -> None:
    file.chmod(0o640)
    with pytest.raises(ConfigurationError, match="others may read it"):
        read_keys(file)


def test_keys_are_shown_nowhere(keys: Keys) -> None:
    assert "private" not in repr(keys)
    assert "pseudonyms" not in repr(keys)


def test_a_pseudonym_is_of_all_its_parts(keys: Keys) -> None:
    made = {
        keys.pseudonym("rater", "ab", "c"),
        keys.pseudonym("rater", "a", "bc"),
        keys.pseudonym("client", "ab", "c"),
    }
    assert len(made) == 3
