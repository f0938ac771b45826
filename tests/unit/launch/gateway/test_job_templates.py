"""Templates of jobs: what is wrong is told when the gateway starts, and harms nothing while it serves."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("argon2", reason="the gateway needs its extra")

from penstock.config.configuration_error import ConfigurationError
from penstock.launch.gateway.job_templates import TemplateFolder, check_templates

NUMBER = """
[template.numbers.maxSteps]
settings = {{"learner.total_steps" = 512}}
least = {least}
most = {most}
default = {default}
whole = true
"""


def number(least: str = "1", most: str = "10", default: str = "2") -> str:
    """A template with one number."""
    return NUMBER.format(least=least, most=most, default=default)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (number(least="5", most="1", default="3"), "must lie between"),
        (number(default="11"), "must lie between"),
        (number(least="nan"), "finite"),
        (number(most="inf"), "finite"),
        (number(default="2.5"), "must be whole"),
        ('[template]\nkind = "rlfh"', "use one of: rlhf"),
        ('[template]\nheading = "a"', "template.heading"),
        ('environment = "CartPole-v1"', "write a table, as .environment."),
        ("x = [", "cannot be read as TOML"),
    ],
)
def test_what_could_never_be_chosen_is_refused_at_the_start(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "one.toml").write_text(text)
    with pytest.raises(ConfigurationError, match=message) as raised:
        check_templates(tmp_path, {"rlhf"})
    assert str(tmp_path / "one.toml") in str(raised.value)


def a_pipe(file: Path) -> None:
    """Make one without a writer."""
    os.mkfifo(file)


def a_device(file: Path) -> None:
    """Make one that never ends."""
    file.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [a_pipe, a_device, Path.mkdir])
def test_what_is_no_file_is_not_waited_for(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "one.toml")
    with pytest.raises(ConfigurationError, match="is no file"):
        check_templates(tmp_path, {"rlhf"})


def test_a_template_that_is_half_written_harms_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "one.toml").write_text(number(most="10"))
    (tmp_path / "two.toml").write_text(number())
    folder = TemplateFolder(tmp_path)
    caplog.set_level(logging.WARNING)
    (tmp_path / "one.toml").write_text(number(most="20")[:-9])
    (tmp_path / "new.toml").write_text("[templ")
    for _ in range(3):
        assert folder.templates().keys() == {"one", "two"}
        assert folder.templates()["one"].numbers["maxSteps"].most == 10
        assert folder.templates()["one"].recipe == {}
    assert len(caplog.records) == 2
    (tmp_path / "one.toml").write_text(number(most="20"))
    (tmp_path / "two.toml").unlink()
    assert folder.templates().keys() == {"one"}
    assert folder.templates()["one"].numbers["maxSteps"].most == 20
