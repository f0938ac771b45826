import pytest

from penstock.protocol.limits import MAX_ID_LENGTH, check_id, to_id


@pytest.mark.parametrize("value", ["a", "0", "cartpole-v1-x", "a" * MAX_ID_LENGTH])
def test_an_id_is_returned_as_it_is(value: str) -> None:
    assert value == check_id("run", value)


@pytest.mark.parametrize("value", ["", "-a", "a-", "A", "a_b", "a b", "ä", "a\n", "a" * (MAX_ID_LENGTH + 1)])
def test_what_is_no_id_is_refused_with_field_value_and_remedy(value: str) -> None:
    with pytest.raises(ValueError, match=r"run=.* is not an id: use 1 to 64 of a-z, 0-9 and '-'"):
        check_id("run", value)


def test_a_huge_value_is_not_repeated_in_full() -> None:
    with pytest.raises(ValueError, match="is not an id") as caught:
        check_id("run", "A" * 2**20)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("text", "expected"),
    [("CartPole-v1", "cartpole-v1"), ("ALE/Pong-v5", "ale-pong-v5"), ("--", "x"), ("x" * 99, "x" * 48)],
)
def test_any_text_becomes_an_id(text: str, expected: str) -> None:
    assert expected == check_id("run", to_id(text))
