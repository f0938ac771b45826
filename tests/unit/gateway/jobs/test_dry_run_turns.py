"""Projects take turns at dry runs, and nobody waits for ever or takes all places."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from penstock.gateway.jobs.job_dispatcher import MOST_OF_PROJECT, DryRunTurns, NoTurn


async def stays() -> bool:
    """A caller who waits on."""
    return True


async def leaves() -> bool:
    """A caller who has gone."""
    return False


async def until_waiting(turns: DryRunTurns, count: int) -> None:
    """Go on when so many wait."""
    while len(turns._waiting) != count:  # noqa: ASYNC110 - the callers have no event to tell it by
        await asyncio.sleep(0)


async def test_the_project_that_had_it_longest_ago_is_next() -> None:
    turns, order, go = DryRunTurns(look_s=0.0), list[str](), asyncio.Event()

    async def ask(project: str, subject: str) -> None:
        async with turns.turn(project, subject, stays):
            order.append(subject)
            await go.wait()

    asked = [
        ("loop", "loop-1"),
        ("loop", "loop-2"),
        ("loop", "loop-3"),
        ("b", "b-1"),
        ("c", "c-1"),
        ("b", "b-2"),
    ]
    tasks = []
    for number, one in enumerate(asked):
        tasks.append(asyncio.create_task(ask(*one)))
        await until_waiting(turns, number)
    go.set()
    await asyncio.gather(*tasks)
    assert order == ["loop-1", "b-1", "c-1", "loop-2", "b-2", "loop-3"]


async def test_a_turn_is_had_by_one_and_given_back_whatever_comes_of_it() -> None:
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
async def test_who_has_waited_long_enough_or_has_gone_waits_no_more(
    goes_on: Callable[[], Awaitable[bool]], wait_s: float
) -> None:
    turns = DryRunTurns(wait_s, look_s=0.0)
    async with turns.turn("a", "a-1", stays):
        with pytest.raises(NoTurn, match="ask again") as caught:
            async with turns.turn("b", "b-1", goes_on):
                pass
        assert not caught.value.is_own
        assert turns._waiting == []


async def test_places_of_a_caller_and_a_project_are_bounded() -> None:
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
