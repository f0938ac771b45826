"""Transformers and peft alone read what a run of language models leaves; it answers as the policy did."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from penstock.actor.specification import policy_maker
from penstock.config import settings as configuration
from penstock.config.settings import ActorSection, ConfigurationError, Settings, dump
from penstock.learner.checkpoint.store import CheckpointStore
from penstock.learner.publish.kept_versions import FinalPolicy, read_final, write_final
from penstock.policy.weights import encode
from penstock.protocol.schema import fragment_schema
from penstock.protocol.specification import Probe, RunSpecification
from penstock.workloads.language.policy import LanguagePolicy, build
from penstock.workloads.rlhf import artefacts, commands
from penstock.workloads.rlhf.environment import spaces

SUMMARY: dict[str, Any] = {"run": "a", "solved": True, "evaluation": {"mean": 0.7}, "policy_version": 9}


def settings_of(base: Path) -> Settings:
    """A run on the tiny model."""
    kwargs = {"model": str(base), "prompts": "p", "reward": "grpc://x:1", "response_tokens": 8}
    return configuration.load(
        [
            {
                "workload": "rlhf",
                "environment": {"id": "words", "kwargs": kwargs},
                "policy": {"kwargs": {"model": str(base), "rank": 2}},
                "actor": {"unroll_length": 12},
            }
        ]
    )


@pytest.fixture
def trained(base: Path, tmp_path: Path) -> tuple[Path, LanguagePolicy]:
    """A run's folder with its final version, and that policy."""
    settings = settings_of(base)
    observation, action = spaces(settings.environment)
    policy = build(observation, action, settings.policy, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.trained().values():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    specification = RunSpecification(
        run="a",
        seed=0,
        environment_json=settings.environment.canonical_json(),
        policy_json=settings.policy.canonical_json(),
        actor_json=settings.actor.canonical_json(),
        evaluation_json=settings.evaluation.canonical_json(),
        workload="rlhf",
        observation_space=observation,
        action_space=action,
        schema=fragment_schema(observation, action),
        probe=Probe({}, {}),
        unroll_length=12,
        lock_step=False,
        session_timeout_ms=30_000,
    )
    (tmp_path / "policies").mkdir()
    write_final(tmp_path, FinalPolicy(specification=specification, blob=encode(policy), version=9, update=8))
    tensors = {f"critic/{name}": tensor for name, tensor in policy.critic.state_dict().items()}
    CheckpointStore(tmp_path / "checkpoints", keep=2).write("1-1", {**tensors, "policy/x": torch.ones(1)}, {})
    (tmp_path / "config.toml").write_text(dump(settings))
    (tmp_path / "metrics.jsonl").write_text('{"update": 1}\n{"update": 2}\n')
    return tmp_path, policy


def test_the_final_policy_is_read_without_penstock(base: Path, trained: tuple[Path, LanguagePolicy]) -> None:
    run_dir, policy = trained
    artefacts.write(settings_of(base), run_dir, SUMMARY)
    folder = run_dir / "policies" / "v9"
    bare = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = PeftModel.from_pretrained(bare, folder).eval()
    ids = torch.tensor([[1, 9, 12, 5]])
    with torch.inference_mode():
        torch.testing.assert_close(model(input_ids=ids).logits, policy.network(input_ids=ids).logits)
    assert AutoTokenizer.from_pretrained(folder)("good bad")["input_ids"] == [1, 4, 14]
    sampled = GenerationConfig.from_pretrained(folder)
    assert (sampled.do_sample, sampled.temperature, sampled.max_new_tokens) == (True, 1.0, 8)


def test_the_value_head_is_that_of_the_last_checkpoint(
    base: Path, trained: tuple[Path, LanguagePolicy]
) -> None:
    run_dir, policy = trained
    artefacts.write(settings_of(base), run_dir, SUMMARY)
    found = load_file(run_dir / "value_head.safetensors")
    expected = policy.critic.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_the_manifest_names_every_file_with_its_digest(
    base: Path, trained: tuple[Path, LanguagePolicy]
) -> None:
    run_dir, _ = trained
    artefacts.write(settings_of(base), run_dir, SUMMARY)
    manifest = json.loads((run_dir / "manifest.json").read_text())
    assert manifest["policy"] == "policies/v9"
    assert manifest["results"]["evaluation"] == {"mean": 0.7}
    assert {"policies/v9/adapter_model.safetensors", "training_results.json"} <= manifest["files"].keys()
    for name, digest in manifest["files"].items():
        assert hashlib.sha256((run_dir / name).read_bytes()).hexdigest() == digest
    results = json.loads((run_dir / "training_results.json").read_text())
    assert results["history"] == [{"update": 1}, {"update": 2}]
    assert results["policy_version"] == 9


def test_a_run_that_failed_early_leaves_its_results(base: Path, tmp_path: Path) -> None:
    artefacts.write(settings_of(base), tmp_path, {**SUMMARY, "failure": "it did"})
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["policy"] is None
    assert json.loads((tmp_path / "training_results.json").read_text())["failure"] == "it did"


def test_generate_answers_as_the_policy_does(
    trained: tuple[Path, LanguagePolicy], capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, policy = trained
    options: dict[str, Any] = {
        "tokens": None, "seed": 3, "assignments": None, "trust": True, "as_json": True,
    }  # fmt: skip
    assert commands.generate(run_dir, ["apple", "bird book"], count=2, deterministic=False, **options) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [answer["prompt"] for answer in answers] == ["apple", "apple", "bird book", "bird book"]
    tokenizer = AutoTokenizer.from_pretrained(policy.section.model)
    for answer in answers:
        prompt = tokenizer(answer["prompt"])["input_ids"]
        row = np.array([[*prompt, *answer["tokens"]]])
        assert answer["response"] == tokenizer.decode(answer["tokens"], skip_special_tokens=True)
        assert answer["ended"] == (answer["tokens"][-1] == tokenizer.eos_token_id)
        with torch.inference_mode():
            shares = policy.network(input_ids=torch.tensor(row)).logits[0].log_softmax(-1)
        drawn = torch.tensor(row[0, len(prompt) :])
        expected = shares[len(prompt) - 1 : -1].gather(1, drawn[:, None]).sum()
        assert answer["log_prob"] == pytest.approx(float(expected), abs=1e-4)
    commands.generate(run_dir, ["apple"], count=3, deterministic=True, **options)
    likely = capsys.readouterr().out.splitlines()
    assert len(set(likely)) == 1


def test_a_run_without_a_configuration_is_told_where_its_model_lies(
    base: Path, trained: tuple[Path, LanguagePolicy], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "far"
    shutil.copytree(trained[0], run_dir)
    (run_dir / "config.toml").unlink(missing_ok=True)
    options: dict[str, Any] = {
        "count": 1, "tokens": None, "seed": 3, "deterministic": False, "trust": False, "as_json": True,
    }  # fmt: skip
    with pytest.raises(ConfigurationError, match=r"--set 'actor\.places\.model="):
        commands.generate(run_dir, ["apple"], assignments=[], **options)
    said = [f'actor.places.model="{base}"', 'actor.places.prompts="p"', 'actor.places.reward="r"']
    assert commands.generate(run_dir, ["apple"], assignments=said, **options) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "apple"


def test_generate_imports_what_a_foreign_folder_names_only_with_trust(
    trained: tuple[Path, LanguagePolicy],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run_dir, _ = trained
    file = run_dir / "config.toml"
    file.write_text(file.read_text().replace("grpc://x:1", "theirs:score"))
    options: dict[str, Any] = {
        "count": 1, "tokens": None, "seed": 3, "deterministic": False, "assignments": None, "as_json": True,
    }  # fmt: skip
    with pytest.raises(ConfigurationError, match="names modules to be imported: theirs; say --trust"):
        commands.generate(run_dir, ["apple"], trust=False, **options)
    assert capsys.readouterr().out == ""
    assert commands.generate(run_dir, ["apple"], trust=True, **options) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "apple"


def test_a_language_model_is_not_served_action_by_action(
    base: Path, trained: tuple[Path, LanguagePolicy]
) -> None:
    final = read_final(trained[0])
    make = policy_maker(final.specification, ActorSection(places={"model": str(base)}))
    with pytest.raises(
        ConfigurationError, match=r"workload='rlhf': its LanguagePolicy gives no single actions"
    ):
        make()
