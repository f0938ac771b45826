"""Where models lie, several threads that read them at once, and folders that bring code."""

import io
import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from penstock.config.settings import ConfigurationError, EnvironmentSection
from penstock.workloads.language.policy import LanguageSection, make_network
from penstock.workloads.language.reward.reward_model import RewardModel
from penstock.workloads.language.settings import place_of
from penstock.workloads.language.tokenizer import load_tokenizer
from penstock.workloads.rlhf.environment import spaces
from tests.support.language.tiny_reward import make_reward_model


def test_models_that_are_read_at_once_leave_torch_as_it_was(base: Path) -> None:
    section = LanguageSection(model=str(base))
    with ThreadPoolExecutor(3) as threads:
        made = list(threads.map(lambda _: make_network(section, 0), range(24)))
    for network in (*made, make_network(section, 0)):
        assert {parameter.device.type for parameter in network.parameters()} == {"cpu"}


def test_a_folder_is_told_from_a_name_of_the_hub(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(base.parent)
    assert place_of("model", base.name) == str(base)
    assert place_of("model", "openai-community/gpt2") == "openai-community/gpt2"
    assert place_of("model", "gpt2") == "gpt2"


@pytest.mark.parametrize("name", ["./nothing", "/nothing/here", "~/nothing", "models/of/mine"])
def test_a_folder_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"policy\.kwargs\.model='{name}': there is no such folder"):
        place_of("policy.kwargs.model", name)


def plant(folder: Path, settings: str, **said: object) -> Path:
    """Have a settings file of a model's folder name code beside it; the mark that the code would leave."""
    mark = folder / "ran"
    (folder / "evil.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass Evil: pass\n")
    path = folder / settings
    path.write_text(json.dumps({**json.loads(path.read_text()), **said}))
    return mark


def test_the_code_of_a_tokenizer_is_not_run_whatever_the_terminal_says(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(base, tmp_path / "model"))
    mark = plant(
        folder,
        "tokenizer_config.json",
        tokenizer_class="Evil",
        auto_map={"AutoTokenizer": ["evil.Evil", None]},
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with pytest.raises(ConfigurationError, match="no tokenizer"):
        load_tokenizer(str(folder))
    assert not mark.exists()


def test_the_code_of_a_reward_model_is_not_run_whatever_the_terminal_says(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "reward"
    make_reward_model(base, folder)
    mark = plant(folder, "config.json", model_type="evil", auto_map={"AutoConfig": "evil.Evil"})
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with pytest.raises(ConfigurationError, match="trust_remote_code"):
        RewardModel.load(folder)
    assert not mark.exists()


def test_an_adapter_that_is_a_pickle_is_refused_by_name(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "reward"
    make_reward_model(base, folder)
    weights = load_file(folder / "adapter_model.safetensors")
    torch.save(weights, folder / "adapter_model.bin")  # noqa: TID251 - what must be refused
    RewardModel.load(folder)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigurationError, match=r"found: adapter_model\.bin, which is a pickle"):
        RewardModel.load(folder)


def test_a_model_whose_weights_are_a_pickle_alone_is_refused(base: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(base, tmp_path / "model")
    torch.save({}, folder / "pytorch_model.bin")  # noqa: TID251 - what must be refused
    make_network(LanguageSection(model=str(folder)), 0)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigurationError, match="cannot be read as a causal language model: .*safetensors"):
        make_network(LanguageSection(model=str(folder)), 0)
    with pytest.raises(
        ConfigurationError, match="cannot be read as a model for classification: .*safetensors"
    ):
        make_reward_model(folder, tmp_path / "reward")


def test_an_adapter_that_names_a_module_is_refused(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "reward"
    make_reward_model(base, folder)
    plant(folder, "adapter_config.json", megatron_config={"a": 1}, megatron_core="evil")
    with pytest.raises(ConfigurationError, match="its megatron_config names a module to import"):
        RewardModel.load(folder)


def test_a_name_that_is_no_folder_and_no_model_of_the_hub_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    remedy = (
        "'nowhere': .*: there is no such folder, and the hub gave no model of this name .*; name a folder"
    )
    with pytest.raises(ConfigurationError, match=rf"^model={remedy}"):
        load_tokenizer("nowhere")
    with pytest.raises(ConfigurationError, match=rf"^policy\.kwargs\.model={remedy}"):
        make_network(LanguageSection(model="nowhere"), 0)
    with pytest.raises(ConfigurationError, match=rf"^environment\.kwargs\.model={remedy}"):
        spaces(EnvironmentSection(kwargs={"model": "nowhere"}))
