"""The reward model that a loop keeps: the newest one, and nothing of what people wrote."""

import json
from pathlib import Path

from penstock.workloads.chat.step_process import JUDGE, ServedJudge, judge_address, keep_judge


def made(folder: Path, name: str) -> Path:
    """A round's reward model, as far as its card goes."""
    folder.mkdir()
    card = {
        "base": "base",
        "checks": [{"ids": [1, 2], "given": [0.5]}],
        "trained": {"settings": {"epochs": 1}, "bad_rows_shown": ["line 3: what somebody wrote"]},
    }
    (folder / "heads.json").write_text(json.dumps(card))
    (folder / "adapter_model.safetensors").write_text(name)
    return folder


def test_the_newest_is_kept_without_what_people_wrote(tmp_path: Path) -> None:
    (tmp_path / f".{JUDGE}-new").mkdir()
    for name in ("one", "two"):
        keep_judge(tmp_path, made(tmp_path / name, name))
        assert (tmp_path / JUDGE / "adapter_model.safetensors").read_text() == name
    card = json.loads((tmp_path / JUDGE / "heads.json").read_text())
    assert card == {"base": "base", "checks": [], "trained": {"settings": {"epochs": 1}}}
    assert sorted(path.name for path in tmp_path.iterdir()) == [JUDGE, "one", "two"]


def test_without_a_model_nothing_is_served(tmp_path: Path) -> None:
    (tmp_path / "judge.json").write_text(
        json.dumps({"role": "reward", "address": "127.0.0.1:1", "metrics_port": 0, "pid": 1})
    )
    with ServedJudge(tmp_path) as served:
        served.look()
        assert judge_address(tmp_path) == ""
    assert judge_address(tmp_path) == ""
