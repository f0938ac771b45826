"""The service for agents, called by a program that knows nothing of Penstock, its token in a netrc file."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

pytest.importorskip("peft", reason="language models need the extra rlhf")
pytest.importorskip("requests", reason="what such programs call with")

import httpx2

from tests.support.gateway import agent_program
from tests.support.gateway.gateway_stand import end_jobs, new_token
from tests.support.gateway.printed_answers import DRY_RUN, LISTED, TRAINED, differences
from tests.support.run.harness import GatewayProcess

SHIPPED: Final = Path(__file__).parents[3] / "penstock" / "recipes" / "service"
QUICK: Final = 8
pytestmark = pytest.mark.timeout(1800)


@dataclass(frozen=True)
class Service:
    """A gateway that offers the service. token: of an editor. program: what the program printed."""

    gateway: GatewayProcess
    folder: Path
    token: str
    program: dict[str, Any]


def run_program(gateway: GatewayProcess, folder: Path, token: str, steps: int) -> dict[str, Any]:
    netrc = folder / "netrc"
    netrc.write_text(f"machine 127.0.0.1 login agent password {token}\n")
    netrc.chmod(0o600)
    done = subprocess.run(
        [sys.executable, str(agent_program.__file__), gateway.url, str(steps)],
        env={"NETRC": str(netrc), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr + gateway.log.read_text()
    return dict(json.loads(done.stdout))


def served(folder: Path, steps: int, template: str, shipped: Path = SHIPPED) -> Iterator[Service]:
    """A gateway at which the program has run. template: that it gets where it names none, of `shipped`."""
    templates = folder / "templates"
    templates.mkdir()
    shutil.copy(shipped / f"{template}.toml", templates / "rlhf.toml")
    token = new_token(folder, "alpha")
    try:
        with GatewayProcess(folder, "--templates", "templates", "--models", "models") as gateway:
            yield Service(gateway, folder, token, run_program(gateway, folder, token, steps))
    finally:
        end_jobs(folder)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    yield from served(tmp_path_factory.mktemp("service"), QUICK, "quick")


def check_trained(service: Service, steps: int) -> None:
    result, folder = service.program["result"], service.folder
    assert differences(TRAINED, result) == []
    assert differences(LISTED, service.program["rows"]) == []
    assert (result["version"], result["feedbackCount"]) == ("v15", 15)
    assert result["trainingSteps"] == steps
    assert service.program["trained"] == ["v15", result["rewardMean"], result["rewardStd"]]
    assert result["rewardStd"] >= 0
    assert service.program["listed"] == [["v15", result["rewardMean"]]]
    place = folder / "models" / "alpha" / "my_agent" / "v15"
    assert (folder / result["modelPath"], folder / result["rewardModelPath"]) == (
        place / "policy",
        place / "reward_model",
    )
    assert (place / "policy" / "adapter_model.safetensors").exists()
    assert (place / "reward_model" / "reward.json").exists()
    assert json.loads((place / "training_results.json").read_text())["updates"] == steps


@pytest.mark.slow
def test_train_policy_dry_run(service: Service) -> None:
    dry = service.program["dry"]
    assert differences(DRY_RUN, dry) == []
    assert (dry["feedbackCount"], dry["estimatedSteps"]) == (15, QUICK)
    assert dry["scoreMean"] == pytest.approx(0.7)
    assert dry["scoreStd"] == pytest.approx(0.02**0.5)
    assert dry["estimatedTimeMinutes"] > 0
    assert dry["modelConfig"] == {
        "base_model": "words", "use_lora": True, "learning_rate": 2e-3, "max_steps": QUICK
    }  # fmt: skip


@pytest.mark.slow
def test_train_policy_actual_training(service: Service) -> None:
    check_trained(service, QUICK)
    loaded = Path(f"/proc/{service.gateway.process.pid}/maps").read_text()
    assert "libpython" in loaded or "python" in loaded
    assert "libtorch" not in loaded


@pytest.mark.slow
def test_complete_rlhf_workflow(service: Service) -> None:
    client = httpx2.Client(base_url=service.gateway.url, auth=("agent", service.token), timeout=900)
    for number in range(5):
        body = {"prompt": f"another question {number}", "response": "yes of course", "score": 0.9}
        assert client.post("/api/policies/feedback/my_agent", json=body).status_code == 200
    for label in ("v20", "v20.2"):
        reply = client.post("/api/policies/train_policy/my_agent", json={"maxSteps": QUICK})
        assert (reply.status_code, reply.json()["version"]) == (200, label), reply.text
        assert (service.folder / reply.json()["modelPath"]).is_dir()
    listed = client.get("/api/policies/my_agent").json()
    assert [one["version"] for one in listed] == ["v20.2", "v20", "v15"]
    again = client.post("/api/policies/train_policy/my_agent", json={"maxSteps": QUICK, "rewardModel": "v15"})
    assert (again.status_code, again.json()["version"]) == (200, "v20.3"), again.text
    models, file = service.folder / "models" / "alpha" / "my_agent", "reward_model/adapter_model.safetensors"
    kept = [(models / label / file).read_bytes() for label in ("v15", "v20.3", "v20.2")]
    assert kept[0] == kept[1] != kept[2]


@pytest.mark.slow
def test_the_shipped_template_ends_in_minutes(tmp_path: Path) -> None:
    for service in served(tmp_path, 1000, "rlhf"):
        check_trained(service, 1000)


def base_model(folder: Path) -> None:
    """A model of GPT-2's form and nothing of its size, with room for what the presets have it read."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from penstock.workloads.language.pretraining import tiny_models

    tokenizer = tiny_models.build_tokenizer(["question", *map(str, range(20))])
    tokenizer.model_max_length = 256
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    size = {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 256}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **size, **ids))
    tiny_models.save(model, tokenizer, folder)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["small", "production"])
def test_a_preset_trains_ones_own_model(tmp_path: Path, preset: str) -> None:
    base_model(tmp_path / "base")
    text = (SHIPPED / f"{preset}.toml").read_text()
    assert '"/models/base"' in text
    (tmp_path / "shipped").mkdir()
    (tmp_path / "shipped" / f"{preset}.toml").write_text(
        text.replace('"/models/base"', f'"{tmp_path / "base"}"')
    )
    for service in served(tmp_path, 1, preset, tmp_path / "shipped"):
        check_trained(service, 1)
