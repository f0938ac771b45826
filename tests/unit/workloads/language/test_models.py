import gzip
import io
import json
import shutil
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from penstock.broker.log.replies import ProbeAnswer
from penstock.config import settings as configuration
from penstock.config.settings import ConfigurationError, EnvironmentSection
from penstock.config.workload import find
from penstock.learner.algorithms.rows import RankGroup
from penstock.learner.model import Model
from penstock.policy import weights
from penstock.policy.tokens import TokenRows
from penstock.protocol.spaces import Discrete
from penstock.runtime.lifecycle import Lifecycle
from penstock.runtime.retry import Interrupted
from penstock.workloads.chat.chat_environment import ChatEnvironment, people_tokenizer
from penstock.workloads.chat.commands import train_base
from penstock.workloads.chat.people import draw_prompt, draw_response
from penstock.workloads.language.cached_generation import device_of
from penstock.workloads.language.conversation import ChatEncoder
from penstock.workloads.language.feedback import BadRows
from penstock.workloads.language.language_model import make_model
from penstock.workloads.language.policy import LanguagePolicy, LanguageSection, build, make_network
from penstock.workloads.language.pretraining import tiny_models
from penstock.workloads.language.pretraining.conversation_files import (
    Conversation,
    as_typed,
    closeness,
    packaged_conversations,
    read_conversations,
)
from penstock.workloads.language.pretraining.tiny_models import (
    RESULT,
    pretrain_base,
    pretraining_settings,
    supervised_rows,
)
from penstock.workloads.language.prompt import Message
from penstock.workloads.language.reward.reward_model import RewardModel
from penstock.workloads.language.settings import place_of
from penstock.workloads.language.tokenizer import (
    Encoder,
    Tokenizer,
    TooLong,
    end_ids,
    load_tokenizer,
    pad,
)
from penstock.workloads.rlhf.environment import spaces as environment_spaces
from tests.support.experience.token_experience import batch_of, fragment, sample
from tests.support.language.tiny_models import make_reward_model


def test_a_device_that_is_named_is_taken_and_auto_is_what_there_is() -> None:
    there = "cuda" if torch.cuda.is_available() else "cpu"
    assert [device_of(name) for name in ("cpu", "cuda:1", "auto")] == ["cpu", "cuda:1", there]


VOCABULARY = 36


def made(base: Path, **sections: Any) -> Model:
    words = {"model": str(base), "prompts": "p", "reward": "grpc://x:1", "response_tokens": 8}
    usual: dict[str, Any] = {
        "workload": "rlhf",
        "environment": {"id": "words", "kwargs": words},
        "algorithm": {"name": "token_ppo", "batch_steps": 512},
        "policy": {"kwargs": {"model": str(base), "rank": 4}},
        "actor": {"unroll_length": 24},
    }
    settings = configuration.load([usual, sections])
    return make_model(settings, find("rlhf"), RankGroup(), torch.device("cpu"))


def test_a_model_publishes_its_adapter(base: Path) -> None:
    model = made(base, learner={"target_return": 0.5})
    module = model.algorithm.published_modules()["default"]
    assert model.weight_bytes == len(weights.encode(module)) < 100_000
    assert model.specification.schema.by_name["observation"].dtype == "int64"
    assert model.target == 0.5


def test_only_the_learner_has_a_critic_with_an_adapter(base: Path) -> None:
    asked = {"model": str(base), "rank": 4, "critic": "adapter"}
    model = made(base, policy={"kwargs": asked})
    assert "critic" not in json.loads(model.specification.policy_json)["kwargs"]
    assert any(name.startswith("critic/adapter.") for name in model.algorithm.state().tensors)
    assert model.weight_bytes == made(base).weight_bytes
    without = {"name": "token_ppo", "batch_steps": 512, "advantage": "group"}
    with pytest.raises(ConfigurationError, match=r"policy\.kwargs\.critic='adapter': .*advantage='group'"):
        made(base, policy={"kwargs": asked}, algorithm=without)


def test_the_probe_finds_a_missing_adapter(base: Path) -> None:
    rates = {"name": "token_ppo", "batch_steps": 512, "learning_rate": 2e-3, "critic_learning_rate": 2e-3}
    model = made(base, algorithm=rates)
    module, probe = model.algorithm.published_modules()["default"], model.specification.probe
    section = configuration.PolicySection(kwargs={"model": str(base), "rank": 4})
    actor = build(Discrete(VOCABULARY), Discrete(VOCABULARY), section, 5)
    weights.load_into(actor, weights.encode(module))
    behind = actor.acting_log_prob(probe.observation, probe.action)
    written = sample(actor, (1, 20, 21), 8, 5, 0, vocabulary=VOCABULARY)
    scored = [replace(one, score=float(index % 2)) for index, one in enumerate(written)]
    model.algorithm.update(batch_of(fragment(scored, vocabulary=VOCABULARY)), progress=0.0)
    model.quarantine.expect(1, "sha", weights.snapshot(module))
    weights.load_into(actor, weights.encode(module))
    right = actor.acting_log_prob(probe.observation, probe.action)
    for answer, held in ((right, False), (behind, True), (right, False)):
        told = ProbeAnswer(
            session=3, actor_id="actor-0", version=1, sha256="sha", log_prob=tuple(answer.tolist())
        )
        model.quarantine.check([told])
        assert model.quarantine.holds(3) is held


def test_a_training_starts_from_named_weights(base: Path, tmp_path: Path) -> None:
    module = made(base).algorithm.published_modules()["default"]
    moved = {name: np.add(array, 0.05, dtype=np.float32) for name, array in weights.snapshot(module).items()}
    file = tmp_path / "7.safetensors"
    file.write_bytes(weights.encode(moved))
    begun = made(base, policy={"kwargs": {"model": str(base), "rank": 4, "begin_with": str(file)}})
    policy = begun.algorithm.published_modules()["default"]
    assert weights.encode(policy) == file.read_bytes()
    assert isinstance(policy, LanguagePolicy)
    assert isinstance(module, LanguagePolicy)
    tokens = torch.arange(3, 8).unsqueeze(0)
    rows = TokenRows(tokens, torch.ones_like(tokens, dtype=torch.bool), torch.arange(5), tokens[0] + 1)
    assert torch.equal(policy.reference_log_prob(rows), module.reference_log_prob(rows))
    assert not torch.equal(policy.reference_log_prob(rows), policy.outputs(rows).log_prob)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"policy\.kwargs\.begin_with='.*absent': No such file or directory; name a file of weights"),
        (b"x", r"policy\.kwargs\.begin_with='.*other': holds no weights of this network"),
    ],
)
def test_unusable_start_weights_are_refused(
    base: Path, tmp_path: Path, content: bytes | None, message: str
) -> None:
    file = tmp_path / ("absent" if content is None else "other")
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigurationError, match=message):
        made(base, policy={"kwargs": {"model": str(base), "rank": 4, "begin_with": str(file)}})


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"algorithm": {"name": "ppo"}}, r"algorithm\.name='ppo': does not .* writes tokens; use token_ppo"),
        ({"actor": {"unroll_length": 65}}, r"actor\.unroll_length=65: .* reads 64 tokens"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(
    base: Path, section: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        made(base, **section)


def test_models_read_at_once_leave_torch_unchanged(base: Path) -> None:
    section = LanguageSection(model=str(base))
    with ThreadPoolExecutor(3) as threads:
        made = list(threads.map(lambda _: make_network(section, 0), range(24)))
    for network in (*made, make_network(section, 0)):
        assert {parameter.device.type for parameter in network.parameters()} == {"cpu"}


def test_a_folder_is_distinguished_from_a_name_of_the_hub(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(base.parent)
    assert place_of("model", base.name) == str(base)
    assert place_of("model", "openai-community/gpt2") == "openai-community/gpt2"
    assert place_of("model", "gpt2") == "gpt2"


@pytest.mark.parametrize("name", ["./nothing", "/nothing/here", "~/nothing", "models/of/mine"])
def test_a_folder_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"policy\.kwargs\.model='{name}': there is no such folder"):
        place_of("policy.kwargs.model", name)


def plant(folder: Path, settings: str, **said: object) -> Path:
    mark = folder / "ran"
    (folder / "evil.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass Evil: pass\n")
    path = folder / settings
    path.write_text(json.dumps({**json.loads(path.read_text()), **said}))
    return mark


def test_the_code_of_a_tokenizer_is_not_run_whatever_the_terminal_says(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(base, tmp_path / "model"))
    brought = {"AutoTokenizer": ["evil.Evil", None]}
    mark = plant(folder, "tokenizer_config.json", tokenizer_class="Evil", auto_map=brought)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with pytest.raises(ConfigurationError, match="no tokenizer"):
        load_tokenizer(str(folder))
    assert not mark.exists()


def test_the_code_of_a_reward_model_is_not_run_whatever_the_terminal_says(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_reward_model(base, folder := tmp_path / "reward")
    mark = plant(folder, "config.json", model_type="evil", auto_map={"AutoConfig": "evil.Evil"})
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with pytest.raises(ConfigurationError, match="trust_remote_code"):
        RewardModel.load(folder)
    assert not mark.exists()


def test_an_adapter_that_is_a_pickle_is_refused_by_name(base: Path, tmp_path: Path) -> None:
    make_reward_model(base, folder := tmp_path / "reward")
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
    with pytest.raises(ConfigurationError, match="cannot be read as a model for classification: .*safet"):
        make_reward_model(folder, tmp_path / "reward")


def test_an_adapter_that_names_a_module_is_refused(base: Path, tmp_path: Path) -> None:
    make_reward_model(base, folder := tmp_path / "reward")
    plant(folder, "adapter_config.json", megatron_config={"a": 1}, megatron_core="evil")
    with pytest.raises(ConfigurationError, match="its megatron_config names a module to import"):
        RewardModel.load(folder)


def test_a_name_that_is_no_folder_and_no_model_of_the_hub_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    remedy = "'nowhere': .*: there is no such folder, and the hub gave no model of this name .*; name a f"
    with pytest.raises(ConfigurationError, match=rf"^model={remedy}"):
        load_tokenizer("nowhere")
    with pytest.raises(ConfigurationError, match=rf"^policy\.kwargs\.model={remedy}"):
        make_network(LanguageSection(model="nowhere"), 0)
    with pytest.raises(ConfigurationError, match=rf"^environment\.kwargs\.model={remedy}"):
        environment_spaces(EnvironmentSection(kwargs={"model": "nowhere"}))


def test_a_learned_tokenizer_gives_every_text_back_as_it_was() -> None:
    tokenizer = tiny_models.learn_tokenizer(["I'm well, thanks. And you?"] * 3, size=300, max_tokens=64)
    for text in ("I'm well, thanks. And you?", "Zürich: 雪 – 3 × 4!", "  ends are cut  "):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text.strip()


def test_questions_and_answers_have_separate_end_tokens() -> None:
    tokenizer = tiny_models.learn_tokenizer(["a b c"], size=300, max_tokens=64)
    encoder = ChatEncoder(tokenizer)
    asked, answer = [Message("user", "a b")], Message("assistant", "c")
    ask = tokenizer.convert_tokens_to_ids("<ask>")
    begun = encoder.begin(asked)
    assert (begun[0], begun[-1]) == (tokenizer.bos_token_id, ask)
    sampled = [*tokenizer("c", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    more = encoder.follow(asked, sampled[-1], [Message("user", "a")])
    assert [*begun, *sampled, *more] == encoder.begin([*asked, answer, Message("user", "a")])


class ThreadWatch(threading.Event):
    """Notes how many threads torch has whenever a training asks whether it is to end."""

    def __init__(self) -> None:
        super().__init__()
        self.threads = set[int]()

    def is_set(self) -> bool:
        self.threads.add(torch.get_num_threads())
        return super().is_set()


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Torch has two threads, also behind the test, and then as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_tiny_model_learns_in_one_thread_and_restores_the_thread_count(is_stopped: bool) -> None:
    tokenizer = tiny_models.build_tokenizer(["a", "b"])
    model, stop = tiny_models.build_model(tokenizer, seed=0), ThreadWatch()
    if is_stopped:
        stop.set()
    with pytest.raises(Interrupted) if is_stopped else nullcontext():
        tiny_models.pretrain(model, tokenizer, [("a", "b")], steps=1, seed=0, stop=stop)
    assert stop.threads == {1}


TEMPLATE = "{% for turn in messages %}{{ turn['role'] + ' ' + turn['content'] + ' ' }}{% endfor %}assistant"


def tokenizer() -> Tokenizer:
    return tiny_models.build_tokenizer(["a", "b", "c", "d", "user", "assistant"])


def test_a_row_is_prompt_response_and_end() -> None:
    assert [1, 4, 5, 6, 7, 2] == Encoder(tokenizer(), 16).encode("a b", "c d")
    assert [1, 2] == Encoder(tokenizer(), 16).encode("", "")


def test_a_long_prompt_loses_its_beginning_and_is_counted() -> None:
    encoder = Encoder(tokenizer(), 5)
    assert [1, 5, 6, 7, 2] == encoder.encode("a b c", "d")
    assert [1, 5, 4, 5, 2] == encoder.encode("a b", "a b")
    assert 2 == encoder.cut
    assert [1, 4, 5, 6, 2] == encoder.encode("", "a b c")
    assert 2 == encoder.cut


def test_a_response_is_never_cut() -> None:
    with pytest.raises(TooLong, match="the response has 5 tokens, 4 fit"):
        Encoder(tokenizer(), 4).encode("a", "a b c d")


def test_a_conversation_goes_through_the_chat_template() -> None:
    turns = (Message("user", "a"),)
    plain = tokenizer()
    with pytest.raises(ValueError, match="no chat template"):
        Encoder(plain, 16).encode(turns, "b")
    plain.chat_template = TEMPLATE
    assert [8, 4, 9, 5, 2] == Encoder(plain, 16).encode(turns, "b")


def test_padding_is_on_the_right_and_masked() -> None:
    ids, mask = pad([[5], [4, 5, 6]], 0)
    assert [[5, 0, 0], [4, 5, 6]] == ids.tolist()
    assert [[1, 0, 0], [1, 1, 1]] == mask.tolist()


@pytest.mark.parametrize(
    ("pad_token", "message"), [("<eos>", "has the pad token of eos"), (None, "has no pad token")]
)
def test_a_tokenizer_without_a_pad_token_of_its_own_is_refused(
    tmp_path: Path, pad_token: str | None, message: str
) -> None:
    unfit = tokenizer()
    unfit.pad_token = pad_token
    unfit.save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match=message):
        load_tokenizer(str(tmp_path))


def saved(folder: Path, ends: Any, **config: Any) -> Tokenizer:
    """The tokenizer of a model whose files name these end tokens, as it is read."""
    made = tokenizer()
    model = tiny_models.build_model(made, seed=0)
    tiny_models.save(model, made, folder)
    plant(folder, "generation_config.json", eos_token_id=ends)
    plant(folder, "config.json", **config)
    return load_tokenizer(str(folder))


def test_an_answer_ends_at_every_end_token_that_the_model_names(tmp_path: Path) -> None:
    assert end_ids(saved(tmp_path, [5, 2, 7])) == [2, 5, 7]
    assert end_ids(saved(tmp_path, 6)) == [2, 6]
    (tmp_path / "generation_config.json").unlink()
    plant(tmp_path, "config.json", eos_token_id=[2, 4])
    assert end_ids(load_tokenizer(str(tmp_path))) == [2, 4]


def test_an_answer_ends_at_what_the_chat_template_writes_behind_it(tmp_path: Path) -> None:
    made = saved(tmp_path, 2)
    made.add_tokens(["<|end|>"])
    made.chat_template = "{% for m in messages %}{{ m.role }} {{ m.content }}\n<|end|>\n{% endfor %}"
    assert end_ids(made) == [2, made.convert_tokens_to_ids("<|end|>")]
    made.chat_template = "{% for m in messages %}{{ m.role }} {{ m.content }}\nd {% endfor %}"
    assert end_ids(made) == [2], "a word behind an answer is no end token"


@pytest.mark.parametrize("special", [False, True])
def test_a_tokenizer_with_more_tokens_than_embeddings_is_refused(tmp_path: Path, special: bool) -> None:
    made = saved(tmp_path, 2)
    made.add_tokens(["more"], special_tokens=special)
    made.save_pretrained(tmp_path)
    with pytest.raises(
        ConfigurationError, match=r"'more' has no embedding: there are 10; call model\.resize_"
    ):
        load_tokenizer(str(tmp_path))
    plant(tmp_path, "config.json", vocab_size=11)
    assert len(load_tokenizer(str(tmp_path))) == 11


OPENAI = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
SHARED = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]}
SINGLE = {"prompt": "hi", "response": "hello"}


def write(folder: Path, *rows: Any, name: str = "said.jsonl") -> Path:
    file = folder / name
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_conversations_of_three_forms_say_the_same(tmp_path: Path) -> None:
    longer = {"messages": [*OPENAI["messages"], {"role": "user", "content": "and?"}]}
    file = write(tmp_path, OPENAI, SHARED, SINGLE, longer)
    listed = tmp_path / "list.json"
    listed.write_text(json.dumps([SHARED, OPENAI], indent=1))
    found, bad = read_conversations([file, listed])
    said = {tuple((one.role, one.content) for one in each.messages) for each in found}
    assert said == {(("user", "hi"), ("assistant", "hello"))}
    assert (len(found), bad.count) == (6, 0)
    assert found[-1].where == "list.json item 2"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (3, "holds int, not an object"),
        ({"text": "a"}, "has neither messages, nor conversations, nor prompt and response"),
        ({"messages": "hi"}, "messages is text"),
        ({"messages": OPENAI["messages"][:1]}, "has no answer of an assistant"),
        ({"messages": OPENAI["messages"][1:]}, "user and assistant do not take turns"),
        ({"messages": [OPENAI["messages"][0], *OPENAI["messages"]]}, "do not take turns"),
        ({"prompt": "hi", "response": "  "}, "has an empty message"),
        ({"conversations": 3}, "conversations is no list"),
        (
            {"messages": [OPENAI["messages"][0], {**OPENAI["messages"][1], "weight": 0}]},
            "no answer is learned",
        ),
        (
            {"messages": [OPENAI["messages"][0], {**OPENAI["messages"][1], "weight": 0.5}]},
            "weight=0.5: use 0",
        ),
        (
            {"prompt": "hi", "response": "cut \ud83d"},
            "response='cut \\ud83d': holds half of a surrogate pair",
        ),
        ({"conversations": [{"from": "bing", "value": "a"}]}, "has a message with from='bing'"),
    ],
)
def test_an_invalid_conversation_is_counted_and_named(tmp_path: Path, row: Any, said: str) -> None:
    found, bad = read_conversations([write(tmp_path, OPENAI, row)])
    assert len(found) == 1
    assert bad.shown[0].startswith("said.jsonl line 2: ")
    assert said in bad.shown[0]


def test_files_that_cannot_be_read_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"none\.jsonl: cannot be read"):
        read_conversations([tmp_path / "none.jsonl"])
    (tmp_path / "bad.json").write_text("[1, ")
    with pytest.raises(ConfigurationError, match=r"bad\.json item 2: no JSON object"):
        read_conversations([tmp_path / "bad.json"])
    (tmp_path / "bad.jsonl").write_text("{\n")
    with pytest.raises(ConfigurationError, match=r"no conversation can be used\nbad\.jsonl line 1: no JSON"):
        read_conversations([tmp_path / "bad.jsonl"])


def test_packaged_conversations_take_turns_and_each_is_there_once() -> None:
    found = packaged_conversations()
    assert len(found) > 700
    for one in found:
        assert [said.role for said in one.messages] == ["user", "assistant"] * (len(one.messages) // 2)
        assert all(said.content.strip() for said in one.messages)
    assert len({one.messages for one in found}) == len(found)


def test_conversations_are_also_used_in_lower_case() -> None:
    one = packaged_conversations()[0]
    typed = as_typed(one)
    assert typed.messages[0].content == one.messages[0].content.lower().replace("?", "").replace(".", "")
    assert typed.messages[1] == one.messages[1]


def test_an_answer_is_measured_by_the_nearest_known_one() -> None:
    one = packaged_conversations()[0]
    question, answer = one.messages[0].content, one.messages[1].content
    assert closeness([question, one.messages[:1]], [answer, answer]) == [1.0, 1.0]
    assert closeness([question, "never asked"], ["xyzzy", answer]) == [0.0, 0.0]
    assert 0 < closeness([question], [answer.split()[0]])[0] < 1


SETTINGS = ("epochs=12", "max_tokens=48", "hidden=32", "layers=1", "learning_rate=1e-2")


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations of two answers, and one without an answer."""
    rng, rows = np.random.default_rng(0), []
    for _ in range(150):
        messages = []
        for _turn in range(2):
            messages.append({"role": "user", "content": draw_prompt(rng)})
            answer = draw_response(rng, messages[-1]["content"])
            messages.append({"role": "assistant", "content": answer})
        rows.append({"messages": messages})
    return write(tmp_path_factory.mktemp("talks"), *rows, {"messages": []}, name="talks.jsonl")


@pytest.fixture(scope="module")
def talker(talks: Path) -> Path:
    """What the command makes of them."""
    out, life = talks.parent / "base", Lifecycle("pretrain")
    assert train_base(life, [talks], out, model=None, assignments=SETTINGS, as_json=False) == 0
    return out


def test_a_base_model_has_learned_to_answer(talker: Path) -> None:
    told = json.loads((talker / RESULT).read_text())
    assert told["loss"] < told["loss_before"] - 0.5
    assert told["conversations"] + told["held_out"] == 150
    assert 3 <= told["held_out"] <= 40
    assert told["bad_shown"] == ["talks.jsonl line 151: prompt is an empty conversation"]


def test_an_environment_uses_its_tokenizer(talker: Path) -> None:
    environment = ChatEnvironment(model=str(talker), max_length=48)
    observation, info = environment.reset(seed=0)
    assert info["messages"][0]["role"] == "user"
    assert (observation != environment._tokenizer.unk_token_id).all()


def test_an_existing_model_is_trained_further(talker: Path, talks: Path) -> None:
    before = (talker / "model.safetensors").read_bytes()
    settings = pretraining_settings(["epochs=1", "max_tokens=48", "learning_rate=1e-4"])
    told = pretrain_base([talks], talks.parent / "further", settings, model=str(talker))
    known = json.loads((talker / RESULT).read_text())
    assert told["loss_before"] == pytest.approx(known["loss"], abs=1e-3)
    assert (talker / "model.safetensors").read_bytes() == before


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("is_small", "threads"), [(True, 1), (False, 2)])
def test_a_small_new_model_is_trained_in_one_thread(
    talker: Path, talks: Path, tmp_path: Path, is_small: bool, threads: int
) -> None:
    watch, settings = ThreadWatch(), pretraining_settings([*SETTINGS, "epochs=0.1"])
    model = None if is_small else str(talker)
    pretrain_base([talks], tmp_path / "base", settings, model=model, stop=watch)
    assert watch.threads == {threads}


def test_unusable_input_is_refused_by_name(talker: Path, talks: Path) -> None:
    settings = pretraining_settings(SETTINGS)
    long = talks.parent / "long.jsonl"
    long.write_text(json.dumps({"prompt": "how", "response": "the " * 20}) + "\n")
    with pytest.raises(ConfigurationError, match="holds a model already"):
        pretrain_base([talks], talker, settings)
    for text, said in (("epochs=0", "epochs=0"), ("hidden=30", "hidden=30: must be a multiple of 4")):
        with pytest.raises(ConfigurationError, match=said):
            pretraining_settings([text])
    with pytest.raises(ConfigurationError, match="there is no such folder"):
        pretrain_base([talks], talks.parent / "never", settings, model="./nowhere")
    with pytest.raises(ConfigurationError, match="no conversation is left to train on, or to hold out"):
        pretrain_base([long], talks.parent / "never", pretraining_settings(["max_tokens=8"]))
    stop = threading.Event()
    stop.set()
    with pytest.raises(Interrupted):
        pretrain_base([talks], talks.parent / "stopped", settings, stop=stop)
    assert not (talks.parent / "stopped").exists()


TOKENIZER = people_tokenizer()
TALK = Conversation(
    (
        Message("user", "how soil rose"),
        Message("assistant", "gladly seed"),
        Message("user", "why lawn"),
        Message("assistant", "maybe spade"),
    ),
    "line 1",
)


def test_only_the_assistants_tokens_are_learned() -> None:
    [row] = supervised_rows([TALK], TOKENIZER, 64, BadRows())
    words = TOKENIZER.convert_ids_to_tokens(row.ids)
    assert " ".join(words) == "<bos> how soil rose gladly seed <eos> why lawn maybe spade <eos>"
    learned = [word for word, is_learned in zip(words, row.learned, strict=True) if is_learned]
    assert learned == ["gladly", "seed", "<eos>", "maybe", "spade", "<eos>"]


def test_an_answer_of_weight_0_is_context_and_is_not_learned(tmp_path: Path) -> None:
    asked, said = (
        {"role": "user", "content": "how soil rose"},
        {"role": "assistant", "content": "gladly seed"},
    )
    more: list[dict[str, Any]] = [
        {"role": "user", "content": "why lawn"},
        {"role": "assistant", "content": "maybe spade", "weight": 1},
    ]
    named = {"user": "human", "assistant": "gpt"}
    for system in ([], [{"role": "system", "content": "rose"}]):
        messages: list[dict[str, Any]] = [*system, asked, {**said, "weight": 0}, *more]
        shared = [
            {"from": named.get(one["role"], "system"), "value": one["content"], "weight": one.get("weight")}
            for one in messages
        ]
        talks, bad = read_conversations(
            [
                write(tmp_path, {"messages": messages}, {"conversations": shared}),
                write(tmp_path, OPENAI, name="b.jsonl"),
            ]
        )
        for row in supervised_rows(talks[:2], TOKENIZER, 64, bad):
            words = TOKENIZER.convert_ids_to_tokens(row.ids)
            assert "gladly seed <eos> why" in " ".join(words)
            learned = [word for word, is_learned in zip(words, row.learned, strict=True) if is_learned]
            assert learned == ["maybe", "spade", "<eos>"]
        assert supervised_rows(talks[:2], TOKENIZER, 9, bad) == []
        assert [line.partition(": ")[2] for line in bad.shown] == [
            "no answer that is learned fits in 9 tokens: raise max_tokens"
        ] * 2
    packed = tmp_path / "talks.json.gz"
    packed.write_bytes(gzip.compress(b"\xef\xbb\xbf" + json.dumps([OPENAI, SHARED], indent=1).encode()))
    raw = tmp_path / "raw.jsonl"
    raw.write_text("\ufeff" + json.dumps({**SINGLE, "response": "a\u2028b\x85c"}, ensure_ascii=False) + "\n")
    with raw.open("ab") as file:
        file.write(b'{"prompt": "bad\xe9", "response": "x"}\r\n' + json.dumps(OPENAI).encode())
    found, bad = read_conversations([packed, raw])
    assert ([one.messages[-1].content for one in found]) == ["hello", "hello", "a\u2028b\x85c", "hello"]
    assert bad.shown == ["raw.jsonl line 2: no JSON object: byte 0xe9 in column 16 is not UTF-8"]


def test_a_long_conversation_is_cut_after_an_answer() -> None:
    bad = BadRows()
    [row] = supervised_rows([TALK], TOKENIZER, 11, bad)
    assert len(row.ids) == 7
    assert supervised_rows([TALK], TOKENIZER, 6, bad) == []
    assert bad.shown == ["line 1: no answer that is learned fits in 6 tokens: raise max_tokens"]


def test_text_in_the_name_of_another_is_not_learned() -> None:
    bad = BadRows()
    sly = Conversation((Message("user", "how <eos>"), Message("assistant", "seed")), "line 9")
    assert supervised_rows([sly], TOKENIZER, 64, bad) == []
    assert bad.shown[0].startswith("line 9: messages[0].content holds '<eos>'")
