"""One caller leaves room for others, whatever it does."""

from penstock.actor.serving.episodes import CallerShares
from penstock.rpc.identity import Identity, Party


def caller(name: str) -> Identity:
    """A client with a certificate."""
    return Identity(run="r", party=Party.CLIENT, name=name)


def fill(shares: CallerShares, owner: Identity | None) -> int:
    """How much more this caller may hold, one by one."""
    count = 0
    while shares.fits(owner, 1):
        shares.add(owner, 1)
        count += 1
    return count


def test_who_comes_later_finds_room() -> None:
    shares = CallerShares(1000)
    assert [fill(shares, caller(name)) for name in ("a", "b", "c", "d")] == [500, 250, 125, 63]
    assert shares.used == 938
    assert "this caller has 500" in shares.why_not(caller("a"), "serving.max_episodes")
    assert "of 1000 (serving.max_episodes)" in shares.why_not(caller("a"), "serving.max_episodes")
    shares.add(caller("a"), -500)
    assert fill(shares, caller("d")) > 0
    assert fill(shares, caller("e")) > 0


def test_without_identities_there_is_one_caller_who_may_hold_the_whole() -> None:
    shares = CallerShares(7)
    assert fill(shares, None) == 7
    assert "7 of 7 (it)" in shares.why_not(None, "it")
    assert not shares.fits(None, 1)


def test_a_caller_finds_room_in_the_smallest() -> None:
    assert fill(CallerShares(1), caller("a")) == 1


def test_who_holds_nothing_is_forgotten() -> None:
    shares = CallerShares(10)
    for number in range(100):
        shares.add(caller(f"c-{number}"), 1)
        shares.add(caller(f"c-{number}"), -1)
    assert shares.used == 0
    assert not shares._held
