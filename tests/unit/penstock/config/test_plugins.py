"""What installed workloads add to the configuration, found by entry point."""

import sys
from pathlib import Path

import pytest

from penstock.config import workload
from penstock.config.algorithm_sections import TokenPPOSection, algorithm_sections
from penstock.config.settings import ConfigurationError, Settings, load
from penstock.config.workload import default_workload, installed, record_of

RECORD = """
from types import SimpleNamespace

WORKLOAD = SimpleNamespace(algorithms={algorithms!r})
"""
SECTION = """
from typing import Literal

from penstock.config.algorithm_sections import AlgorithmSection


class Section(AlgorithmSection):
    name: Literal["mine"] = "mine"
    width: tuple[int, ...] = (3,)


class NoSection:
    pass
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, algorithms: dict[str, str]) -> None:
    """A package of that name with a record, as an installer leaves it."""
    metadata = folder / f"{name}-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[penstock.workloads]\n{name} = {name}_record:WORKLOAD\n")
    (folder / f"{name}_record.py").write_text(RECORD.format(algorithms=algorithms))
    (folder / f"{name}_sections.py").write_text(SECTION)
    monkeypatch.syspath_prepend(folder)
    for module in (f"{name}_record", f"{name}_sections"):
        monkeypatch.delitem(sys.modules, module, raising=False)


def test_the_section_of_a_workload_is_read_and_written_like_one_of_the_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "outside", {"mine": "outside_sections:Section"})
    settings = load([{"algorithm": {"name": "mine", "width": [5, 7]}}])
    assert settings.algorithm.model_dump()["width"] == (5, 7)
    assert load([settings.model_dump()]) == settings
    with pytest.raises(
        ConfigurationError, match=r"algorithm\.depth: unknown key;.* of algorithm\.name='mine'"
    ):
        load([{"algorithm": {"name": "mine", "depth": 1}}])


def test_an_unknown_algorithm_is_refused_with_all_that_there_are() -> None:
    with pytest.raises(
        ConfigurationError, match=r"algorithm\.name='alchemy': not known; use 'ppo', .*'token_ppo'"
    ):
        load([{"algorithm": {"name": "alchemy"}}])


def test_the_section_of_token_sequences_is_that_of_an_installed_workload() -> None:
    assert algorithm_sections()["token_ppo"] is TokenPPOSection
    assert {"control", "rlhf"} <= set(installed())


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("outside_sections:NoSection", "is no AlgorithmSection"),
        ("outside_sections:Missing", "cannot be loaded"),
        ("nowhere:Section", "cannot be loaded"),
        ("outside_broken:Section", "importing it raised SyntaxError: .*python -c 'import outside_broken'"),
        ("outside_failing:Section", "importing it raised ZeroDivisionError"),
    ],
)
def test_a_section_that_cannot_be_used_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, message: str
) -> None:
    install(tmp_path, monkeypatch, "outside", {"mine": path})
    (tmp_path / "outside_broken.py").write_text("def Section(:\n")
    (tmp_path / "outside_failing.py").write_text("1 / 0\n")
    with pytest.raises(ConfigurationError, match=message):
        load([{"algorithm": {"name": "mine"}}])
    load([{"algorithm": {"name": "ppo"}}])


def test_two_workloads_do_not_give_one_name_to_two_algorithms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    shared = {"token_ppo": "penstock.config.algorithm_sections:TokenPPOSection"}
    install(tmp_path / "a", monkeypatch, "first", shared)
    assert algorithm_sections()["token_ppo"] is TokenPPOSection
    install(tmp_path / "b", monkeypatch, "second", {"token_ppo": "second_sections:Section"})
    with pytest.raises(ConfigurationError, match="another section for algorithm.name='token_ppo'"):
        algorithm_sections()


def test_a_module_that_moved_below_penstock_is_named_with_its_new_name() -> None:
    with pytest.raises(ConfigurationError, match="it is penstock.workloads.goals.live_host:target$"):
        workload.load("workloads.goals.live_host:target")


def test_the_workload_of_a_run_that_names_none_is_the_one_that_claims_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert record_of(Settings().workload).default is True
    default_workload.cache_clear()
    install(tmp_path, monkeypatch, "outside", {})
    assert default_workload() == "control"
    default_workload.cache_clear()
    with (tmp_path / "outside_record.py").open("a") as file:
        file.write("WORKLOAD.default = True\n")
    monkeypatch.delitem(sys.modules, "outside_record")
    with pytest.raises(ConfigurationError, match=r"claim to be the default: control, outside; set workload="):
        default_workload()


def test_a_record_that_cannot_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "outside", {})
    (tmp_path / "outside_record.py").write_text("import nowhere_to_be_found\n")
    with pytest.raises(
        ConfigurationError, match=r"workload='outside': outside_record:WORKLOAD cannot be loaded"
    ):
        record_of("outside")
