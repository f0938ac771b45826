"""Prompts: read once, divided by their text, in another order for every seed."""

import json
from itertools import islice
from pathlib import Path

import pytest

from penstock.config.settings import ConfigurationError
from penstock.workloads.language.tokenizer import Encoder, load_tokenizer
from penstock.workloads.rlhf.responses import Prompts, in_random_order, read_prompts

WORDS = ("apple", "bird", "book", "chair", "city", "door", "field", "house")


def write(folder: Path, *rows: object) -> str:
    """A file of JSON lines."""
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def read(base: Path, place: str, *, held_out: float = 0.25, seed: int = 0) -> Prompts:
    """With room for 4 tokens."""
    return read_prompts(place, Encoder(load_tokenizer(str(base)), 4), held_out=held_out, seed=seed)


def test_a_prompt_is_on_one_side_whatever_the_order_of_the_file(base: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{a} {b}"} for a in WORDS for b in WORDS[:4]]
    first = read(base, write(tmp_path, *rows, *rows[:5]))
    second = read(base, write(tmp_path, *reversed(rows)))
    assert len(first.train) == 24
    assert len(first.held_out) == 8
    assert {one.prompt for one in first.held_out} == {one.prompt for one in second.held_out}
    assert {one.index for one in (*first.train, *first.held_out)} == set(range(32))
    other = read(base, write(tmp_path, *rows), seed=1)
    assert {one.prompt for one in first.held_out} != {one.prompt for one in other.held_out}


def test_what_cannot_be_asked_is_named_and_counted(base: Path, tmp_path: Path) -> None:
    place = write(tmp_path, {"prompt": "apple bird"}, {"response": "x"}, {"prompt": "apple " * 9}, [1])
    made = read(base, place, held_out=0)
    assert made.bad.count == 3
    assert made.bad.shown[0] == "prompts.jsonl line 2: no prompt"
    assert "has 10 tokens, 1 to 4 are allowed" in made.bad.shown[1]
    assert made.held_out == ()


def test_prompts_of_which_none_is_left_are_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"1 prompts can be used and 1 of them are held out"):
        read(base, write(tmp_path, {"prompt": "apple bird"}))


def test_every_prompt_comes_once_before_one_comes_again(base: Path, tmp_path: Path) -> None:
    prompts = read(base, write(tmp_path, *({"prompt": word} for word in WORDS)), held_out=0).train
    order = [one.index for one in islice(in_random_order(prompts, 3), 24)]
    assert [sorted(order[start : start + 8]) for start in (0, 8, 16)] == [list(range(8))] * 3
    assert order[:8] != order[8:16]
    assert order == [one.index for one in islice(in_random_order(prompts, 3), 24)]
    assert order != [one.index for one in islice(in_random_order(prompts, 4), 24)]
