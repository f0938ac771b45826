import asyncio
import base64
import json
import sqlite3
import unicodedata
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from penstock.config.configuration_error import ConfigurationError
from penstock.gateway.accounts.principal import BadInput
from penstock.gateway.accounts.sessions import BadToken, Keys, make_keys, read_keys
from penstock.gateway.accounts.users import MAX_LENGTH, _hasher, hash_password, is_password
from penstock.gateway.jobs.job_dispatcher import MOST_OF_PROJECT, DryRunTurns, NoTurn
from penstock.gateway.store.tables import GATEWAY, Base, open_database
from penstock.registry.records import SchemaMismatch
from penstock.registry.registry import Database


def test_a_hash_takes_64_mib_and_matches_only_its_password() -> None:
    encoded = hash_password("correct horse battery", name="ada")
    assert encoded.startswith("$argon2id$v=19$m=65536,t=3,p=4$")
    assert is_password(encoded, "correct horse battery")
    assert not is_password(encoded, "correct horse batterz")
    assert not is_password(None, "correct horse battery")


def test_a_password_matches_however_its_characters_are_composed() -> None:
    composed, decomposed = (unicodedata.normalize(form, "Pässwörd-Bücher-\ufb01n") for form in ("NFC", "NFD"))
    new, earlier = hash_password(decomposed, name="ada"), _hasher.hash(composed)
    for encoded in (new, earlier):
        assert [is_password(encoded, typed) for typed in (composed, decomposed)] == [True, True]
        assert not is_password(encoded, composed.replace("ä", "a"))
    assert is_password(new, unicodedata.normalize("NFKC", composed))
    assert not is_password(None, composed)
    typed = unicodedata.normalize("NFD", "ǘ" * (MAX_LENGTH - 6) + "abcdef")
    assert is_password(hash_password(typed, name="ada"), typed)
    with pytest.raises(BadInput):
        hash_password("ﷺ" * 200, name="ada")  # more than MAX_LENGTH in the form that is hashed


@pytest.mark.parametrize("kept", ["", "-", "plain text", "$argon2id$", "$argon2id$v=19$m=65536,t=3,p=4$x$y"])
def test_an_invalid_hash_matches_no_password(kept: str) -> None:
    assert not is_password(kept, kept)
    assert not is_password(kept, "correct horse battery")


jwt = pytest.importorskip("jwt", reason="the gateway needs its extra")


NOW = datetime(2026, 11, 24, tzinfo=UTC)
CLAIMS: dict[str, Any] = {"sub": "user/a", "aud": "here", "iat": NOW, "exp": NOW + timedelta(minutes=15)}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys.json")
    return tmp_path / "keys.json"


@pytest.fixture
def keys(file: Path) -> Keys:
    return read_keys(file)


def refused(keys: Keys, token: str, now: datetime = NOW) -> bool:
    try:
        keys.verify(token, now, audience="here")
    except BadToken:
        return True
    return False


def part(value: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


def test_a_signed_token_is_valid_until_it_expires(keys: Keys) -> None:
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
    signed = partial(jwt.encode, key=keys.private[keys.signing], algorithm="EdDSA")
    forged = {
        "alg none": f"{part({**kid, 'alg': 'none'})}.{part(plain)}.",
        "alg none, signed": f"{part({**kid, 'alg': 'none'})}.{claims}.{signature}",
        "alg None": f"{part({**kid, 'alg': 'None'})}.{part(plain)}.",
        "no signature": f"{header}.{claims}.",
        "changed": f"{header}.{part({**plain, 'sub': 'user/b'})}.{signature}",
        "another key": jwt.encode(plain, Ed25519PrivateKey.generate(), algorithm="EdDSA", headers=kid),
        "public key as secret": jwt.encode(plain, public, algorithm="HS256", headers=kid),
        "no kid": signed(plain),
        "kid of none": signed(plain, headers={"kid": "x"}),
        "another type": signed(plain, headers={**kid, "typ": "JWT"}),
        "another audience": keys.sign({**CLAIMS, "aud": "there"}),
        "another issuer": signed({**plain, "iss": "x"}, headers=kid),
        "no expiry": signed({k: v for k, v in plain.items() if k != "exp"}, headers=kid),
        "expiry as text": signed({**plain, "exp": "9999999999"}, headers=kid),
        "too long": good + "A" * 5000,
        "nothing": "",
        "dots": "...",
        "not text": "\udcff.a.b",
    }
    assert [name for name, token in forged.items() if not refused(keys, token)] == []


def test_a_new_key_in_front_rotates_keys(file: Path) -> None:
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


def test_the_file_is_made_once_and_readable_only_by_its_owner(file: Path) -> None:
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


def test_a_pseudonym_depends_on_all_its_parts(keys: Keys) -> None:
    made = {
        keys.pseudonym("rater", "ab", "c"),
        keys.pseudonym("rater", "a", "bc"),
        keys.pseudonym("client", "ab", "c"),
    }
    assert len(made) == 3


def tables(file: Path) -> dict[str, list[str]]:
    made = sqlite3.connect(file).execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL")
    return {
        name: sorted(sql.replace(",", " ").replace("(", " ( ").replace(")", " ) ").split())
        for name, sql in made
        if name != GATEWAY.version_table
    }


def test_the_tables_match_the_models(tmp_path: Path) -> None:
    open_database(f"sqlite:///{tmp_path}/a.sqlite", migrate=True).close()
    wanted = Database(f"sqlite:///{tmp_path}/b.sqlite")
    wanted.write(lambda session: Base.metadata.create_all(session.connection()))
    assert tables(tmp_path / "b.sqlite") == tables(tmp_path / "a.sqlite")


def test_a_database_without_tables_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(SchemaMismatch, match=r"accounts database .*: no such file: start `penstock gateway`"):
        open_database(f"sqlite:///{tmp_path}/a.sqlite", migrate=False)


def test_tables_of_another_revision_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.sqlite"
    open_database(f"sqlite:///{file}", migrate=True).close()
    with sqlite3.connect(file) as connection:
        connection.execute("UPDATE gateway_version SET version_num = '0007'")
    connection.close()
    message = (
        rf"accounts database .*{file}: its tables are of revision 0007, this program needs 0008: use the "
        "Penstock that made them, or another accounts database"
    )
    with pytest.raises(SchemaMismatch, match=message):
        open_database(f"sqlite:///{file}", migrate=True)


async def stays() -> bool:
    return True


async def leaves() -> bool:
    return False


async def until_waiting(turns: DryRunTurns, count: int) -> None:
    while len(turns._waiting) != count:  # noqa: ASYNC110 - the callers have no event to tell it by
        await asyncio.sleep(0)


async def test_the_project_served_longest_ago_is_next() -> None:
    turns, order, go = DryRunTurns(look_s=0.0), list[str](), asyncio.Event()

    async def ask(project: str, subject: str) -> None:
        async with turns.turn(project, subject, stays):
            order.append(subject)
            await go.wait()

    asked = ("loop-1", "loop-2", "loop-3", "b-1", "c-1", "b-2")
    tasks = []
    for number, one in enumerate(asked):
        tasks.append(asyncio.create_task(ask(one.partition("-")[0], one)))
        await until_waiting(turns, number)
    go.set()
    await asyncio.gather(*tasks)
    assert order == ["loop-1", "b-1", "c-1", "loop-2", "b-2", "loop-3"]


async def test_one_caller_holds_the_turn_and_always_returns_it() -> None:
    turns, most, there = DryRunTurns(look_s=0.0), [0], [0]

    async def ask(number: int) -> None:
        async with turns.turn(f"p{number}", f"s{number}", stays):
            there[0] += 1
            most[0] = max(most[0], there[0])
            await asyncio.sleep(0)
            there[0] -= 1
            if number % 2:
                raise ValueError("a dry run that fails")

    tasks = [asyncio.create_task(ask(number)) for number in range(20)]
    await until_waiting(turns, 19)
    tasks[-1].cancel()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert most == [1]
    assert [type(one) for one in found[:4]] == [type(None), ValueError, type(None), ValueError]
    assert isinstance(found[-1], asyncio.CancelledError)
    assert turns._waiting == []
    assert turns._has_turn is None


@pytest.mark.parametrize(("goes_on", "wait_s"), [(stays, 0.0), (leaves, 600.0)])
async def test_a_caller_waits_until_its_limit_or_until_it_has_gone(
    goes_on: Callable[[], Awaitable[bool]], wait_s: float
) -> None:
    turns = DryRunTurns(wait_s, look_s=0.0)
    async with turns.turn("a", "a-1", stays):
        with pytest.raises(NoTurn, match="ask again") as caught:
            async with turns.turn("b", "b-1", goes_on):
                pass
        assert not caught.value.is_own
        assert turns._waiting == []


async def test_the_places_of_a_caller_and_a_project_are_limited() -> None:
    turns = DryRunTurns(look_s=0.0)
    async with turns.turn("a", "a-0", stays):
        with pytest.raises(NoTurn, match="of yours goes on") as caught:
            async with turns.turn("a", "a-0", stays):
                pass
        assert caught.value.is_own
        waiting = [
            asyncio.create_task(turns.turn("a", f"a-{number}", stays).__aenter__())
            for number in range(1, MOST_OF_PROJECT)
        ]
        await until_waiting(turns, MOST_OF_PROJECT - 1)
        with pytest.raises(NoTurn, match=f"{MOST_OF_PROJECT} dry runs of this project") as caught:
            async with turns.turn("a", "a-more", stays):
                pass
        assert caught.value.is_own
        waiting.append(asyncio.create_task(turns.turn("b", "b-1", stays).__aenter__()))
        await until_waiting(turns, MOST_OF_PROJECT)
        for one in waiting:
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
