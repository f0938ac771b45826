"""The training of a round has the very network of the run that answers, and learns where nobody is asked."""

import tomllib
from pathlib import Path

from penstock.actor.serving.release import is_same_network
from penstock.config.settings import load
from penstock.learner.model import make_model as make_learned
from penstock.policy import weights
from penstock.workloads.chat.learning_loop import recipe_of
from tests.support.chat.loop_stand import loop_stand
from tests.support.language.text_stand import make_model


def test_its_versions_can_be_arms_of_the_run_that_answers(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base")
    with loop_stand(tmp_path, str(base)) as stand:
        folder = tmp_path / "round"
        folder.mkdir()
        made = load([tomllib.loads(recipe_of(stand.run, folder, 3))])
        assert made.run == "talk-round-3"
        assert made.registry.url == stand.run.url
        assert not made.registry.activate_first
        assert made.serving.listen == ""
        assert made.environment.kwargs["reward"] == str(folder / "judge")
        assert made.policy.kwargs["begin_with"] == str(folder / "begin.safetensors")
        served = make_learned(stand.run.settings)
        (folder / "begin.safetensors").write_bytes(
            weights.encode(served.algorithm.published_modules()["default"])
        )
        assert is_same_network(make_learned(made).specification, served.specification)
