"""A base from conversations: it learns, it is read by everything else, and it can be trained further."""

import json
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.config.settings import ConfigurationError
from penstock.runtime.lifecycle import Lifecycle
from penstock.runtime.retry import Interrupted
from penstock.workloads.chat.chat_environment import ChatEnvironment
from penstock.workloads.chat.commands import train_base
from penstock.workloads.chat.people import draw_prompt, draw_response
from penstock.workloads.language.pretraining.tiny_models import RESULT, pretrain_base, pretraining_settings
from tests.support.language.thread_watch import ThreadWatch, two_threads

SETTINGS = ("epochs=12", "max_tokens=48", "hidden=32", "layers=1", "learning_rate=1e-2")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Talks of two answers, and one that is none."""
    rng, rows = np.random.default_rng(0), []
    for _ in range(150):
        messages = []
        for _turn in range(2):
            prompt = draw_prompt(rng)
            messages += [
                {"role": "user", "content": prompt},
                {"role": "assistant", "content": draw_response(rng, prompt)},
            ]
        rows.append({"messages": messages})
    file = tmp_path_factory.mktemp("talks") / "talks.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"messages": []}]))
    return file


@pytest.fixture(scope="module")
def base(file: Path) -> Path:
    """What the command writes."""
    out = file.parent / "base"
    assert (
        train_base(Lifecycle("pretrain"), [file], out, model=None, assignments=SETTINGS, as_json=False) == 0
    )
    return out


def test_a_base_has_learned_how_people_are_answered(base: Path) -> None:
    told = json.loads((base / RESULT).read_text())
    assert told["loss"] < told["loss_before"] - 0.5
    assert told["conversations"] + told["held_out"] == 150
    assert 3 <= told["held_out"] <= 40
    assert told["bad_shown"] == ["talks.jsonl line 151: prompt is an empty conversation"]


def test_an_environment_speaks_with_its_tokenizer(base: Path) -> None:
    environment = ChatEnvironment(model=str(base), max_length=48)
    observation, info = environment.reset(seed=0)
    assert info["messages"][0]["role"] == "user"
    assert (observation != environment._tokenizer.unk_token_id).all()


def test_a_model_that_is_there_is_trained_further(base: Path, file: Path) -> None:
    before = (base / "model.safetensors").read_bytes()
    settings = pretraining_settings(["epochs=1", "max_tokens=48", "learning_rate=1e-4"])
    told = pretrain_base([file], file.parent / "further", settings, model=str(base))
    known = json.loads((base / RESULT).read_text())
    assert told["loss_before"] == pytest.approx(known["loss"], abs=1e-3)
    assert (base / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(("is_small", "threads"), [(True, 1), (False, 2)])
def test_a_small_model_of_its_own_is_trained_in_one_thread(
    base: Path, file: Path, tmp_path: Path, is_small: bool, threads: int
) -> None:
    watch, settings = ThreadWatch(), pretraining_settings([*SETTINGS, "epochs=0.1"])
    with two_threads():
        pretrain_base([file], tmp_path / "base", settings, model=None if is_small else str(base), stop=watch)
        assert watch.threads == {threads}
        assert torch.get_num_threads() == 2


def test_what_cannot_be_used_is_refused_by_name(base: Path, file: Path) -> None:
    settings = pretraining_settings(SETTINGS)
    long = file.parent / "long.jsonl"
    long.write_text(json.dumps({"prompt": "how", "response": "the " * 20}) + "\n")
    with pytest.raises(ConfigurationError, match="holds a model already"):
        pretrain_base([file], base, settings)
    for text, said in (("epochs=0", "epochs=0"), ("hidden=30", "hidden=30: must be a multiple of 4")):
        with pytest.raises(ConfigurationError, match=said):
            pretraining_settings([text])
    with pytest.raises(ConfigurationError, match="there is no such folder"):
        pretrain_base([file], file.parent / "never", settings, model="./nowhere")
    with pytest.raises(
        ConfigurationError, match="no conversation is left to train on, or to hold out; give more"
    ):
        pretrain_base([long], file.parent / "never", pretraining_settings(["max_tokens=8"]))
    stop = threading.Event()
    stop.set()
    with pytest.raises(Interrupted):
        pretrain_base([file], file.parent / "stopped", settings, stop=stop)
    assert not (file.parent / "stopped").exists()
