"""The engine by its name: the own one, one of an installed package, and names that no package offers."""

from pathlib import Path

import pytest

from penstock.config.settings import ConfigurationError
from penstock.workloads.language.engine import Request, TextEngine, open_engine
from tests.support.language.text_stand import EOS, PAD, adapter, make_model, policy_of

MODULE = """
from penstock.workloads.language.engine import ContinuousEngine
from penstock.workloads.language.engine import LoadedPolicies

def make(policy, **own):
    return ContinuousEngine(LoadedPolicies(policy), **own)
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder."""
    return make_model(tmp_path_factory.mktemp("engine") / "model")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that offers two engines, of which one is broken."""
    (tmp_path / "their_engine.py").write_text(MODULE)
    metadata = tmp_path / "their_engine-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: their-engine\nVersion: 1.0\n")
    lines = "[penstock.engines]\ntheirs = their_engine:make\nbroken = their_engine:missing\n"
    (metadata / "entry_points.txt").write_text(lines)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def opened(name: str, base: Path) -> TextEngine:
    """The engine over a new policy."""
    return open_engine(name, policy_of(base), eos_id=EOS, pad_id=PAD, max_rows=2, seed=0)


@pytest.mark.promise("server-answers-engine-run")
def test_engines_of_all_names_answer_alike(base: Path, installed: Path) -> None:
    found = []
    for name in ("transformers", "theirs"):
        engine = opened(name, base)
        engine.load(1, adapter(base, 1))
        answer = engine.submit(Request(ids=(4, 8, 2, 5, 8), most=4, version=1, seed=3))
        engine.run(lambda answer=answer: bool(answer.finish))  # type: ignore[misc]
        found.append((answer.ids, answer.finish))
    assert found[0] == found[1]
    assert installed.exists()


@pytest.mark.promise("server-answers-engine-run")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vllm", "engine='vllm': no installed package offers it .* use one of broken, theirs, transformers"),
        ("", "engine='': no installed package"),
        ("broken", "engine='broken': their_engine:missing cannot be loaded"),
    ],
)
def test_an_unknown_engine_is_refused_with_what_there_is(
    base: Path, installed: Path, name: str, message: str
) -> None:
    assert installed.exists()
    with pytest.raises(ConfigurationError, match=message):
        opened(name, base)
