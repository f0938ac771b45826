"""The five mutations: deterministic, idempotent, in any order the same, and of any text."""

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.workloads.prompts.features import (
    LONGEST_TOKENS,
    MAX_CHARACTERS,
    MUTATION_TYPES,
    SECTIONS,
    PromptError,
    features_of,
    mutate,
    offered,
    read_prompt,
    token_count,
)

ACTIONS = range(len(MUTATION_TYPES))
PIECES = (
    *SECTIONS, "Write a poem.", "please", "thank you",
    "if you cannot", "for", "example", "first", "then",
    "at most", "1.", "Erklär mir das", "日本語で書いて",
    "😀", "\n", "\n\n", " ", ",", "kindly,", "must",
)  # fmt: skip
TEXTS = st.one_of(
    st.text(min_size=1, max_size=200),
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=12).map(" ".join),
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=12).map("\n\n".join),
)


def applied(prompt: str, actions: tuple[int, ...]) -> str:
    """The prompt after mutations, one after another."""
    for action in actions:
        prompt = mutate(prompt, action)
    return prompt


def is_a_prompt(text: str) -> bool:
    """Whether it is read at all."""
    try:
        read_prompt(text)
    except PromptError:
        return False
    return True


@given(TEXTS.filter(is_a_prompt))
def test_a_mutation_adds_its_feature_once_and_changes_no_other(prompt: str) -> None:
    before = features_of(read_prompt(prompt))
    for action in ACTIONS:
        after = mutate(prompt, action)
        wanted = tuple(one or number == action for number, one in enumerate(before))
        assert features_of(after) == wanted
        assert mutate(after, action) == after
        assert (after == read_prompt(prompt)) == before[action]


@given(TEXTS.filter(is_a_prompt), st.permutations(list(ACTIONS)), st.permutations(list(ACTIONS)))
def test_the_order_of_mutations_does_not_matter(prompt: str, one: list[int], other: list[int]) -> None:
    assert applied(prompt, tuple(one)) == applied(prompt, tuple(other))
    assert applied(prompt, tuple(one[:3])) == applied(prompt, tuple(sorted(one[:3])))


def test_what_the_mutations_do_to_a_request() -> None:
    prompt = "Please, write a haiku about rain. Thanks a lot!"
    assert mutate(prompt, 1) == "Write a haiku about rain."
    assert mutate(prompt, 4).startswith(prompt + "\n\nWork in steps:")
    whole = applied(prompt, (0, 1, 2, 3, 4))
    assert whole == "\n\n".join(["Write a haiku about rain.", *SECTIONS])
    assert len({applied(prompt, order) for order in permutations(ACTIONS)}) == 1


def test_a_prompt_that_says_it_in_its_own_words_is_left_alone() -> None:
    prompt = "List three rivers, for example the Elbe. Use at most 20 words. If you cannot, say so."
    assert [mutate(prompt, action) == prompt for action in ACTIONS] == [True, True, True, True, False]


def test_a_prompt_that_holds_a_section_already_does_not_get_it_again() -> None:
    for action, section in zip((4, 2, 3, 0), SECTIONS, strict=True):
        assert mutate(f"{section} Write a poem.", action) == f"{section} Write a poem."
        assert mutate(section, action) == section


def test_a_mutation_that_would_pass_the_longest_text_changes_nothing() -> None:
    prompt = "x" * (MAX_CHARACTERS - 5)
    assert [mutate(prompt, action) for action in ACTIONS] == [prompt] * 5


def test_text_that_nests_what_is_left_out_ends_soon() -> None:
    prompt = "thank " * 1600 + "you " * 1600
    assert mutate(prompt, 1) == prompt.strip()


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt: is empty"),
        (" \n\t ", "prompt: is empty"),
        ("\u200b\u200b", "prompt: is empty"),
        ("x" * (MAX_CHARACTERS + 1), "prompt: 20001 characters, at most 20000; send a shorter one"),
        ("x" * 1_000_000, "prompt: 1000000 characters, at most 20000"),
        ("a\0b", "prompt: holds a null character"),
        ("a\ud800b", "prompt: holds a null character or half of a surrogate pair"),
        (None, "prompt: must be a text, is a NoneType"),
        (b"bytes", "prompt: must be a text, is a bytes"),
    ],
)
def test_what_is_no_prompt_is_refused_by_name(prompt: str, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        mutate(prompt, 0)


@pytest.mark.parametrize("action", [-1, 5, True, 1.0, "1", None])
def test_what_is_no_action_is_refused_by_name(action: int) -> None:
    with pytest.raises(PromptError, match=r"action=.*: is no mutation; choose one of 0 try-catch-style, 1"):
        mutate("Write a poem.", action)


def test_a_long_prompt_is_offered_nothing_that_lengthens_it() -> None:
    assert offered("Write a poem.") == (True,) * 5
    long = "word " * LONGEST_TOKENS
    assert token_count(read_prompt(long)) == LONGEST_TOKENS
    assert offered(long) == (False, True, False, False, False)


def test_a_prompt_has_one_form() -> None:
    assert read_prompt("  Cafe\u0301\r\nau lait\r ") == "Café\nau lait"
