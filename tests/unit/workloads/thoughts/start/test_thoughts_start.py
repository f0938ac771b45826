"""What a run of thoughts needs first: made once, kept, and held against its lengths."""

import threading
from pathlib import Path
from typing import Any

import pytest

from penstock.config import settings as configuration
from penstock.config.settings import ConfigurationError, PolicySection, Progress, Settings
from penstock.workloads.thoughts.environment import ThoughtReinforceSection
from penstock.workloads.thoughts.start import START_MODEL, check_lengths, prepare
from penstock.workloads.thoughts.tasks import Rings
from tests.support.thoughts.small_thoughts import small_base


class Renamed(Rings):
    """The small rings, with their words in another order."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.words = self.words[::-1]


def settings(*, unroll_length: int = 20, baseline: str = "group", **kwargs: Any) -> Settings:
    """Of a run on small rings. kwargs: of its environment."""
    usual = {"task": "rings:6:3", "group": 4, "thought_tokens": 4}
    layer = {
        "workload": "thoughts",
        "environment": {"id": "rings", "count": 8, "kwargs": usual | kwargs},
        "actor": {"unroll_length": unroll_length},
        "algorithm": {"name": "thought_reinforce", "baseline": baseline},
    }
    return configuration.load([layer])


def test_a_model_that_is_there_is_kept_and_named(tmp_path: Path) -> None:
    small_base(tmp_path / START_MODEL)
    before = {file.name: file.read_bytes() for file in (tmp_path / START_MODEL).iterdir()}
    made = prepare(settings(), tmp_path, Progress(lambda _: None, threading.Event()))
    assert made.environment.kwargs["model"] == str((tmp_path / START_MODEL).absolute())
    assert made.policy.kwargs == {"lora": False, "model": made.environment.kwargs["model"]}
    assert before == {file.name: file.read_bytes() for file in (tmp_path / START_MODEL).iterdir()}


@pytest.mark.parametrize("is_named", [False, True])
def test_a_model_of_another_task_is_refused(tmp_path: Path, *, is_named: bool) -> None:
    small_base(tmp_path / START_MODEL)
    model: dict[str, Any] = {"model": str(tmp_path / START_MODEL)} if is_named else {}
    same_size = settings(task=f"{__name__}:Renamed", **model)
    with pytest.raises(ConfigurationError, match=rf"model='{tmp_path}.*task='{__name__}:Renamed'"):
        prepare(same_size, tmp_path, Progress(lambda _: None, threading.Event()))


@pytest.mark.parametrize(
    ("over", "named"),
    [
        ({"group": 3}, "group=3: environment.count=8"),
        ({"unroll_length": 5}, r"unroll_length=5: .*needs 16"),
        ({"task": "mazes"}, "no such task"),
        ({"thoughts": 3}, "unknown key"),
        ({"empty_share": 1.5}, "empty_share=1.5"),
        ({"hidden": 20}, "hidden=20: .*multiple of 8"),
        ({"hidden": 1_000_000_000}, "hidden=1000000000: .*less than or equal to 4096"),
        ({"layers": 65}, "layers=65: .*less than or equal to 64"),
        ({"thought_tokens": 1}, "thought_tokens=1: a legal thought .* has up to 2 steps"),
        ({"group": 1}, r"group=1: .*algorithm\.baseline='group', and nothing is learned"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(over: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        check_lengths(settings(**over))


def test_a_thought_alone_on_its_question_is_learned_from_without_a_mean() -> None:
    check_lengths(settings(group=1, baseline="none"))


def test_a_reward_of_another_question_needs_another_question() -> None:
    one = settings(group=8)
    check_lengths(one)
    another = one.model_copy(update={"algorithm": ThoughtReinforceSection(reward_from="another")})
    with pytest.raises(ConfigurationError, match=r"environment\.count=8: .*a single question.*group=8"):
        check_lengths(another)


def test_a_learner_on_a_gpu_is_refused_before_the_model_is_made(tmp_path: Path) -> None:
    usual = settings(start_updates=1)
    on_gpu = usual.model_copy(update={"learner": usual.learner.model_copy(update={"device": "cuda"})})
    with pytest.raises(ConfigurationError, match=r"learner\.device='cuda': .*say cpu"):
        prepare(on_gpu, tmp_path, Progress(lambda _: None, threading.Event()))
    assert not any(tmp_path.iterdir())


def test_a_head_that_cannot_be_is_refused_before_the_model_is_made(tmp_path: Path) -> None:
    odd = settings().model_copy(update={"policy": PolicySection(kwargs={"mixing": "wide"})})
    with pytest.raises(ConfigurationError, match=r"policy\.kwargs\.mixing='wide'"):
        prepare(odd, tmp_path, Progress(lambda _: None, threading.Event()))
    assert not any(tmp_path.iterdir())


def test_a_model_that_is_not_there_is_refused_and_not_looked_for_elsewhere(tmp_path: Path) -> None:
    progress = Progress(lambda _: None, threading.Event())
    with pytest.raises(ConfigurationError, match=r"environment\.kwargs\.model='nowhere': no such folder"):
        prepare(settings(model="nowhere"), tmp_path, progress)


@pytest.mark.parametrize("name", ["guard_rules", "guard_classifier"])
def test_a_file_of_the_guard_that_cannot_be_used_is_refused_before_training(
    tmp_path: Path, name: str
) -> None:
    small_base(tmp_path / START_MODEL)
    progress = Progress(lambda _: None, threading.Event())
    with pytest.raises(ConfigurationError, match=rf"environment\.kwargs\.{name}='nowhere\.toml': "):
        prepare(settings(**dict[str, Any]({name: "nowhere.toml"})), tmp_path, progress)


def test_a_file_of_the_guard_is_named_wherever_a_server_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_base(tmp_path / START_MODEL)
    (tmp_path / "rules.toml").write_text("[[rule]]\nname = 'b'\npattern = 'b'\n")
    monkeypatch.chdir(tmp_path)
    made = prepare(settings(guard_rules="rules.toml"), tmp_path, Progress(lambda _: None, threading.Event()))
    assert made.environment.kwargs["guard_rules"] == str(tmp_path / "rules.toml")
    assert "guard_classifier" not in made.environment.kwargs
