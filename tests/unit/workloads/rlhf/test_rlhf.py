import hashlib
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from penstock.actor.specification import policy_maker
from penstock.config import settings as configuration
from penstock.config.settings import (
    ActorSection,
    ConfigurationError,
    EnvironmentSection,
    Progress,
    Settings,
    dump,
)
from penstock.learner.checkpoint.store import CheckpointStore
from penstock.learner.publish.kept_versions import FinalPolicy, read_final, write_final
from penstock.policy.weights import encode
from penstock.protocol.schema import fragment_schema
from penstock.protocol.specification import Probe, RunSpecification
from penstock.runtime.retry import Interrupted
from penstock.training import TrainingResult as RunResult
from penstock.workloads.language.conversation import ChatEncoder
from penstock.workloads.language.policy import LanguagePolicy, build
from penstock.workloads.language.prompt import Message
from penstock.workloads.language.reward.reward_source import Sample
from penstock.workloads.language.tokenizer import load_tokenizer
from penstock.workloads.rlhf import api, artefacts, commands, preparation
from penstock.workloads.rlhf.environment import language, spaces
from penstock.workloads.rlhf.preparation import prepare, services
from penstock.workloads.rlhf.sentiment import Sentiment
from tests.support.language.tiny_models import make_reward_model

RECIPE = """
workload = "rlhf"
[template]
title = "of a gateway"
[environment]
id = "feedback"
[environment.kwargs]
model = "/models/base"
response_tokens = 8
[algorithm]
name = "token_ppo"
batch_steps = 504
"""


@pytest.fixture
def feedback(tmp_path: Path) -> str:
    """Forty scores, and a row that is none."""
    rows = [*Sentiment().scored(np.random.default_rng(0), 40), {"prompt": "the end"}]
    file = tmp_path / "feedback.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "recipe.toml"
    file.write_text(RECIPE)
    return file


def test_feedback_becomes_two_data_sets_without_a_common_prompt(base: Path, feedback: str) -> None:
    sides = api.prepare_feedback_dataset(feedback, api.DatasetConfig(model=str(base), scale="percent"))
    assert all(isinstance(side, api.FeedbackDataset) for side in sides)
    assert sum(map(len, sides)) == 40
    assert sides[0].bad.count == 1
    prompts = [{str(side[index].example.prompt) for index in range(len(side))} for side in sides]
    assert not prompts[0] & prompts[1]
    asked = api.prepare_ppo_dataset(feedback, api.DatasetConfig(model=str(base), validation_share=0.25))
    train, held_out = ({one.index for one in side} for side in (asked.train, asked.held_out))
    assert len(train) > len(held_out) > 0
    assert not train & held_out
    batch = next(iter(DataLoader(sides[0], batch_size=8, collate_fn=sides[0].collate)))
    assert batch["input_ids"].shape == batch["attention_mask"].shape
    assert batch["targets"].shape == (8,)
    assert batch["targets"].abs().max() <= 1.0


def test_a_reward_model_whose_training_was_stopped_is_gone_on_with_and_scores(
    base: Path, feedback: str, tmp_path: Path
) -> None:
    stop, out = threading.Event(), tmp_path / "reward"
    stop.set()
    settings = {"epochs": 1, "batch": 8, "rank": 2}
    config = api.RewardModelConfig(model=str(base), scale="percent", settings=settings)
    with pytest.raises(Interrupted):
        api.train_reward_model(feedback, config, out, stop=stop)
    assert not (out / "reward.json").exists()
    made = api.train_reward_model(feedback, config, out, resume=True)
    samples = [Sample(prompt="the film", response="good")]
    assert api.RewardModel.load(out).score(samples).values == made.score(samples).values


def test_an_invalid_setting_is_named(base: Path, feedback: str, tmp_path: Path) -> None:
    for settings, said in (
        ({"epochs": -1}, "epochs=-1"),
        ({"unheard": 1}, "unheard"),
        ({"batch": 8, "micro_batch": 3}, "micro_batch"),
    ):
        config = api.RewardModelConfig(model=str(base), settings=settings)
        with pytest.raises(ConfigurationError, match=said):
            api.train_reward_model(feedback, config, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_trainer_names_what_it_trains(recipe: Path, feedback: str) -> None:
    config = api.TrainingConfig(
        recipe, feedback, max_steps=3, learning_rate=1e-3, settings={"environment": {"kwargs": {"group": 2}}}
    )
    run = api.RLHFTrainer(config).run_config
    assert run.what == "feedback"
    kwargs = {"model": "/models/base", "response_tokens": 8, "group": 2}
    kwargs |= {"feedback": feedback, "feedback_scale": "0:1"}
    assert run.settings == {
        "workload": "rlhf",
        "environment": {"id": "feedback", "kwargs": kwargs},
        "algorithm": {"name": "token_ppo", "batch_steps": 504, "learning_rate": 1e-3},
        "learner": {"total_updates": 3, "total_steps": 1512},
    }


def test_a_recipe_that_cannot_be_used_is_named(recipe: Path, feedback: str) -> None:
    no_batch = '[environment]\nid = "feedback"'
    for text, said in (("[", "cannot be read as TOML"), (no_batch, "algorithm.batch_steps")):
        recipe.write_text(text)
        with pytest.raises(ConfigurationError, match=said):
            api.RLHFTrainer(api.TrainingConfig(recipe, feedback))
    with pytest.raises(ConfigurationError, match="cannot be read"):
        api.RLHFTrainer(api.TrainingConfig(recipe / "absent", feedback))


def test_the_result_of_a_training_names_its_files(tmp_path: Path) -> None:
    summary = {"evaluation": {"mean": 0.5, "std": 0.1}}
    counts: dict[str, Any] = {"mean_return": 0.5, "updates": 3, "env_steps": 9, "summary": summary}
    ended = RunResult(run_dir=tmp_path, solved=False, interrupted=False, **counts)
    with pytest.raises(ConfigurationError, match="--resume"):
        api.RLHFTrainer.result(ended)
    (tmp_path / "manifest.json").write_text('{"policy": "policies/v3"}')
    assert api.RLHFTrainer.result(ended) == api.TrainingResult(
        policy_path=tmp_path / "policies" / "v3",
        reward_model_path=None,
        training_steps=3,
        reward_mean=0.5,
        reward_std=0.1,
        summary=summary,
    )


SUMMARY: dict[str, Any] = {"run": "a", "solved": True, "evaluation": {"mean": 0.7}, "policy_version": 9}


def settings_of(base: Path) -> Settings:
    """A run on the tiny model."""
    model = {"model": str(base)}
    kwargs = model | {"prompts": "p", "reward": "grpc://x:1", "response_tokens": 8}
    said = {"workload": "rlhf", "environment": {"id": "words", "kwargs": kwargs}}
    return configuration.load(
        [said | {"policy": {"kwargs": model | {"rank": 2}}, "actor": {"unroll_length": 12}}]
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


def test_the_exported_policy_ends_its_responses_where_its_base_does(
    base: Path, trained: tuple[Path, LanguagePolicy], tmp_path: Path
) -> None:
    other, (run_dir, _) = Path(shutil.copytree(base, tmp_path / "base")), trained
    named = json.loads((other / "generation_config.json").read_text()) | {"eos_token_id": [2, 14]}
    (other / "generation_config.json").write_text(json.dumps(named))
    artefacts.write(settings_of(other), run_dir, SUMMARY)
    assert GenerationConfig.from_pretrained(run_dir / "policies" / "v9").eos_token_id == [2, 14]


def test_a_run_leaves_its_value_head_its_results_and_the_digest_of_every_file(
    base: Path, trained: tuple[Path, LanguagePolicy], tmp_path: Path
) -> None:
    run_dir, policy = trained
    artefacts.write(settings_of(base), run_dir, SUMMARY)
    found, expected = load_file(run_dir / "value_head.safetensors"), policy.critic.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    manifest = json.loads((run_dir / "manifest.json").read_text())
    assert manifest["policy"] == "policies/v9"
    assert manifest["results"]["evaluation"] == {"mean": 0.7}
    assert {"policies/v9/adapter_model.safetensors", "training_results.json"} <= manifest["files"].keys()
    for name, digest in manifest["files"].items():
        assert hashlib.sha256((run_dir / name).read_bytes()).hexdigest() == digest
    results = json.loads((run_dir / "training_results.json").read_text())
    assert (results["history"], results["policy_version"]) == ([{"update": 1}, {"update": 2}], 9)
    early = tmp_path / "early"
    early.mkdir()
    artefacts.write(settings_of(base), early, {**SUMMARY, "failure": "it did"})
    assert json.loads((early / "manifest.json").read_text())["policy"] is None
    assert json.loads((early / "training_results.json").read_text())["failure"] == "it did"


def generate(run_dir: Path, prompts: list[str], **said: Any) -> int:
    """The command by its defaults, and what is said otherwise."""
    options: dict[str, Any] = {
        "count": 1, "tokens": None, "seed": 3, "deterministic": False, "assignments": None, "trust": False,
    }  # fmt: skip
    return int(commands.generate(run_dir, prompts, **options | said, as_json=True))


def test_generate_answers_like_the_policy(
    trained: tuple[Path, LanguagePolicy], capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, policy = trained
    assert generate(run_dir, ["apple", "bird book"], count=2, trust=True) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [answer["prompt"] for answer in answers] == ["apple", "apple", "bird book", "bird book"]
    tokenizer = AutoTokenizer.from_pretrained(policy.section.model)
    for answer in answers:
        prompt = tokenizer(answer["prompt"])["input_ids"]
        row = torch.tensor([[*prompt, *answer["tokens"]]])
        assert answer["response"] == tokenizer.decode(answer["tokens"], skip_special_tokens=True)
        assert answer["ended"] == (answer["tokens"][-1] == tokenizer.eos_token_id)
        with torch.inference_mode():
            shares = policy.network(input_ids=row).logits[0].log_softmax(-1)
        expected = shares[len(prompt) - 1 : -1].gather(1, row[0, len(prompt) :, None]).sum()
        assert answer["log_prob"] == pytest.approx(float(expected), abs=1e-4)
    generate(run_dir, ["apple"], count=3, deterministic=True, trust=True)
    assert len(set(capsys.readouterr().out.splitlines())) == 1


def test_a_run_without_a_configuration_needs_the_place_of_its_model(
    base: Path, trained: tuple[Path, LanguagePolicy], capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, _ = trained
    (run_dir / "config.toml").unlink()
    with pytest.raises(ConfigurationError, match=r"--set 'actor\.places\.model="):
        generate(run_dir, ["apple"], assignments=[])
    said = [f'actor.places.model="{base}"', 'actor.places.prompts="p"', 'actor.places.reward="r"']
    assert generate(run_dir, ["apple"], assignments=said) == 0
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
    with pytest.raises(ConfigurationError, match="names modules to be imported: theirs; say --trust"):
        generate(run_dir, ["apple"])
    assert capsys.readouterr().out == ""
    assert generate(run_dir, ["apple"], trust=True) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "apple"


def test_the_action_server_refuses_a_language_model(base: Path, trained: tuple[Path, LanguagePolicy]) -> None:
    final = read_final(trained[0])
    make = policy_maker(final.specification, ActorSection(places={"model": str(base)}))
    with pytest.raises(ConfigurationError, match="'rlhf': its LanguagePolicy gives no single actions"):
        make()


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"temperature": 0.7}, r"temperature=0\.7: sampling cannot be changed"),
        ({"top_p": 0.9}, r"top_p=0\.9: sampling cannot be changed"),
        ({"top_k": 50}, r"top_k=50: sampling cannot be changed"),
        ({"prompt": "x"}, "prompt: unknown key; use one of base_training, conversations, device"),
        ({"group": 0}, "group=0: Input should be greater than 0"),
    ],
)
def test_a_mistake_is_named(kwargs: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"environment\.kwargs\.{said}"):
        language(EnvironmentSection(kwargs=kwargs))
    made = language(EnvironmentSection(kwargs={"temperature": 1, "top_p": 1.0, "top_k": 0, "model": "m"}))
    assert made.model == "m"


FAST = {"epochs": 0.1, "batch": 64, "rank": 2, "max_tokens": 32}


def preparation_settings_of(**kwargs: Any) -> Settings:
    return configuration.load([{"workload": "rlhf", "environment": {"id": "words", "kwargs": kwargs}}])


def progress() -> tuple[Progress, list[str]]:
    """A progress that is never stopped, and what it was told."""
    said: list[str] = []
    return Progress(said.append, threading.Event()), said


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_TEXTS", 64), ("_STEPS", 2), ("_OPINIONS", 80)):
        monkeypatch.setattr(preparation, name, value)


@pytest.mark.usefixtures("quick")
def test_the_built_in_task_is_made_from_nothing_and_kept(tmp_path: Path) -> None:
    told, said = progress()
    made = prepare(preparation_settings_of(task="sentiment", reward_training=FAST), tmp_path, told)
    section = language(made.environment)
    assert section.model == str(tmp_path / "base_model") == made.policy.kwargs["model"]
    assert section.prompts == section.feedback == str(tmp_path / "feedback.jsonl")
    assert section.reward == str(tmp_path / "reward_model")
    assert section.true_reward == "penstock.workloads.rlhf.sentiment:true_rewards"
    assert len(Path(section.feedback).read_text().splitlines()) == 80
    results = json.loads((tmp_path / "reward_model" / "training_results.json").read_text())
    assert results["settings"]["rank"] == 2
    assert results["scale"] == "percent"
    assert len(said) == 4
    files = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")}
    assert prepare(made, tmp_path, told) == made
    assert len(said) == 4
    assert files == {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")}


@pytest.mark.usefixtures("quick")
def test_a_stopped_preparation_is_continued(tmp_path: Path) -> None:
    asked = preparation_settings_of(task="sentiment", reward_training={**FAST, "epochs": 2})
    stopped, _ = progress()
    stopped.stop.set()
    with pytest.raises(Interrupted):
        prepare(asked, tmp_path, stopped)
    assert not (tmp_path / "base_model").exists()

    stop = threading.Event()
    with pytest.raises(Interrupted):
        prepare(asked, tmp_path, Progress(lambda text: stop.set() if "reward model" in text else None, stop))
    assert (tmp_path / "base_model").is_dir()
    assert not (tmp_path / "reward_model" / "reward.json").exists()

    again, said = progress()
    prepare(asked, tmp_path, again)
    assert (tmp_path / "reward_model" / "reward.json").exists()
    assert len(said) == 2


@pytest.mark.usefixtures("quick")
def test_invalid_rows_of_feedback_are_shown_and_left_out(tmp_path: Path) -> None:
    first = prepare(preparation_settings_of(task="sentiment", reward_training=FAST), tmp_path, progress()[0])
    made = language(first.environment)
    feedback = tmp_path / "mine.jsonl"
    rows = Path(made.feedback).read_text().splitlines()
    feedback.write_text("\n".join([*rows[:40], '{"prompt": "no opinion"}', *rows[40:]]) + "\n")
    told, said = progress()
    asked = preparation_settings_of(
        model=made.model, feedback=str(feedback), feedback_scale="percent", reward_training=FAST
    )
    prepare(asked, tmp_path / "run", told)
    shown = next(text for text in said if "bad rows" in text).splitlines()
    assert shown[0] == f"1 bad rows of {feedback}:"
    assert "line 41" in shown[1]


@pytest.mark.parametrize("named", ["other", "gpt2"])
def test_two_different_base_models_are_refused_and_named(base: Path, tmp_path: Path, named: str) -> None:
    (tmp_path / "other").mkdir()
    asked = preparation_settings_of(model=str(base), reward="grpc://127.0.0.1:1", prompts="prompts.jsonl")

    def with_policy(model: str) -> Settings:
        section = asked.policy.model_copy(update={"kwargs": {"model": model}})
        return asked.model_copy(update={"policy": section})

    place = str(tmp_path / named) if named == "other" else named
    with pytest.raises(ConfigurationError, match=r"policy\.kwargs\.model=.*names another base model"):
        prepare(with_policy(place), tmp_path / "run", progress()[0])
    made = prepare(with_policy(str(base)), tmp_path / "run", progress()[0])
    assert made.policy.kwargs["model"] == str(base)


@pytest.mark.usefixtures("quick")
def test_a_model_of_words_knows_the_words_of_pairs(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": f"question {number}", "chosen": f"better {number}", "rejected": f"worse {number}"}
        for number in range(12)
    ]
    rows += [{"prompt": "question alone", "response": "scored", "score": 0.5}, {"chosen": "prompt absent"}]
    talk = [{"role": "user", "content": "spoken words"}]
    rows += [{"prompt": talk, "response": "scored", "score": 0.5}]
    feedback = tmp_path / "pairs.jsonl"
    feedback.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    asked = preparation_settings_of(
        task="words", feedback=str(feedback), feedback_scale="0:1", reward_training={**FAST, "epochs": 1}
    )
    made = language(prepare(asked, tmp_path / "run", progress()[0]).environment)
    words = json.loads((Path(made.model) / "tokenizer.json").read_text())["model"]["vocab"]
    assert {"question", "better", "worse", "scored", "spoken"} <= words.keys()
    assert not {"absent", "[{'role':"} & words.keys()
    tokenizer = load_tokenizer(made.model)
    asked_for = ChatEncoder(tokenizer).begin([Message("user", "question alone")])
    assert asked_for == tokenizer("question alone")["input_ids"]  # as the prompt that it was trained on
    results = json.loads((tmp_path / "run" / "reward_model" / "training_results.json").read_text())
    assert results["feedback"]["bad_rows"] == 1


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({}, "model='': name the folder"),
        ({"model": "m"}, "prompts='': name prompts, or feedback"),
        ({"model": "m", "prompts": "p"}, "reward='': name a source of rewards, or feedback"),
        (
            {"model": "m", "prompts": "p", "reward": "grpc://x:1", "serve_reward": True},
            "reward='grpc://x:1': serve_reward serves a reward model's folder",
        ),
        ({"model": "m", "feedback": "f", "feedback_scale": "inches"}, "feedback_scale='inches': use thumbs"),
        ({"model": "m", "feedback": "f", "reward_training": {"ranc": 3}}, r"reward_training\.ranc"),
        *(
            ({"task": "sentiment", name: "nowhere.toml"}, rf"{name}='nowhere\.toml': ")
            for name in ("guard_rules", "guard_classifier")
        ),
    ],
)
def test_what_cannot_be_prepared_is_named_before_anything_is_made(
    tmp_path: Path, kwargs: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=rf"environment\.kwargs\.{said}"):
        prepare(preparation_settings_of(**kwargs), tmp_path, progress()[0])
    assert not list(tmp_path.iterdir())


def test_the_reward_model_is_served_on_request(base: Path, tmp_path: Path) -> None:
    reward = tmp_path / "reward"
    make_reward_model(base, reward)
    asked = preparation_settings_of(model=str(base), prompts="p", reward=str(reward), serve_reward=True)
    made = services(asked, Path("/run/x"))
    assert made.places == {"reward": "unix:/run/x/reward.sock"}
    listening = ("--listen", "unix:/run/x/reward.sock", "--device", "cpu")
    assert made.commands == {"reward": ("rlhf", "reward", "serve", str(reward), *listening)}
    assert not services(preparation_settings_of(model=str(base), reward=str(reward)), tmp_path).commands
