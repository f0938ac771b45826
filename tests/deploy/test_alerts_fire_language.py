"""Alerts on a language model that learns fire for real: the cause brought about in a run, then removed."""

from pathlib import Path
from typing import Final

import pytest

from tests.deploy.alert_scenes import FASTER, Scene
from tests.deploy.prometheus_server import needs_prometheus, watching
from tests.support.language.agents_run import agent, agents_run, gateway
from tests.support.language.tiny_models import make_guesser

pytestmark = [needs_prometheus, pytest.mark.slow, pytest.mark.timeout(1200)]

ENGINE: Final = """
import dataclasses
import pathlib
from penstock.workloads.language.engine import ContinuousEngine
from penstock.workloads.language.engine import LoadedPolicies

class Forgetful(ContinuousEngine):
    def submit(self, request, *rest):
        if pathlib.Path({forgets!r}).exists():
            request = dataclasses.replace(request, version=0)
        return super().submit(request, *rest)

def make(policy, **own):
    return Forgetful(LoadedPolicies(policy), **own)
"""
"""While a file lies there it draws from the base model, and says that the adapter did; its probe is right."""
CONVERSATIONS: Final = 1_000_000


def install(folder: Path, forgets: Path) -> Path:
    metadata = folder / "their_engine-1.0.dist-info"
    metadata.mkdir(parents=True)
    (folder / "their_engine.py").write_text(ENGINE.format(forgets=str(forgets)))
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: their-engine\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[penstock.engines]\ntheirs = their_engine:make\n")
    return folder


def test_an_engine_that_draws_from_other_weights_than_it_names(
    tmp_path: Path, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgets, socket = tmp_path / "forgets", short_folder / "text.sock"
    monkeypatch.setenv("PYTHONPATH", str(install(tmp_path / "packages", forgets)))
    base = make_guesser(tmp_path / "base", steps=40)
    with (
        agents_run(tmp_path, socket, base, batch_steps=128, engine="theirs") as run,
        watching(tmp_path / "prometheus", run.run_dir / "targets.json", faster=FASTER) as prometheus,
        gateway(socket, tmp_path) as base_url,
        agent("opening", base_url, CONVERSATIONS),
    ):
        scene = Scene(prometheus)
        scene.until_seen("penstock_updates_total > 20")
        scene.until_seen("penstock_engine_difference_nats > 0")
        scene.clears("PenstockEngineDifference")
        forgets.touch()
        scene.fires("PenstockEngineDifference")
        scene.until_seen("penstock_probe_mismatches_total == 0")
        forgets.unlink()
        scene.clears("PenstockEngineDifference")
