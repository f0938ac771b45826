"""Names in certificates."""

import pytest

from penstock.rpc.identity import Identity, Party, Unidentified, from_alternative_names, parse


@pytest.mark.parametrize(
    "identity",
    [Identity(run="run-a", party=party, name=name) for party in Party for name in ("", "gpu-3")],
    ids=str,
)
def test_an_identity_is_read_as_it_is_written(identity: Identity) -> None:
    assert parse(str(identity)) == identity
    assert from_alternative_names([b"localhost", str(identity).encode()]) == identity


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "penstock://",
        "penstock://run-a",
        "penstock://run-a/",
        "penstock://run-a/king",
        "penstock://run-a/actor/",
        "penstock://run-a/actor/a/b",
        "penstock://../actor",
        "penstock://run-a/actor/..",
        "penstock://Run-A/actor",
        "penstock:// run-a/actor",
        "penstock://run-a/actor\0",
        "penstock://run-a/ACTOR",
        "https://run-a/actor",
    ],
)
def test_what_is_no_identity_is_refused(uri: str) -> None:
    with pytest.raises(Unidentified):
        parse(uri)


@pytest.mark.parametrize(
    "names", [[], [b"localhost"], [b"penstock://run-a/actor", b"penstock://run-a/operator"], [b"\xff"]]
)
def test_a_certificate_says_one_thing(names: list[bytes]) -> None:
    with pytest.raises(Unidentified, match="one is needed"):
        from_alternative_names(names)


@pytest.mark.parametrize(
    ("actor_id", "allowed"),
    [("gpu-3", True), ("gpu-3-0", True), ("gpu-30", False), ("gpu", False), ("gpu-4", False)],
)
def test_a_name_holds_for_itself_and_what_it_begins(actor_id: str, allowed: bool) -> None:
    assert Identity(run="run-a", party=Party.ACTOR, name="gpu-3").may_act_as(actor_id) is allowed
    assert Identity(run="run-a", party=Party.ACTOR).may_act_as(actor_id)
