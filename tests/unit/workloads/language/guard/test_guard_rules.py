"""Rules of a file."""

from pathlib import Path

import pytest

from penstock.config.configuration_error import ConfigurationError
from penstock.workloads.language.guard import Direction, fold, matched, read_rules


def write(folder: Path, text: str) -> Path:
    """A file of rules."""
    file = folder / "rules.toml"
    file.write_text(text)
    return file


def test_a_rule_of_a_file_blocks_where_it_says(tmp_path: Path) -> None:
    text = (
        '[[rule]]\nname = "card"\npattern = \'\\d{16}\'\non = ["output"]\n[[rule]]\nname = "b"\npattern = "b"'
    )
    card, other = read_rules(write(tmp_path, text), "--rules")
    assert matched(fold("1234567812345678"), Direction.OUTPUT, [card]) == "card"
    assert matched(fold("1234567812345678"), Direction.INPUT, [card]) == ""
    assert other.on == set(Direction)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rule", "cannot be read"),
        ("", r"write 1 to 256 tables \[\[rule\]\]"),
        ('[[rule]]\nname = "a b"\npattern = "x"', "rule 1: name='a b'"),
        ('[[rule]]\nname = "a"\npattern = "("', r"rule 1: pattern='\(': is no pattern"),
        ('[[rule]]\nname = "a"\npattern = "x*"', "must be text that does not match everything"),
        ('[[rule]]\nname = "a"', "must be text that does not match everything"),
        ('[[rule]]\nname = "a"\npattern = "x"\non = ["sideways"]', "rule 1: on="),
        ('[[rule]]\nname = "a"\npattern = "x"\nof = 1', "rule 1: has name, pattern and on"),
    ],
)
def test_a_file_that_is_wrong_is_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        read_rules(write(tmp_path, text), "--rules")
