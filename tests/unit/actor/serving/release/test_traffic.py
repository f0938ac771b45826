"""What a server reads of the registry and writes to it."""

from pathlib import Path

import pytest

from penstock.actor.serving.release import Traffic
from penstock.protocol.refusal import Reason, Refused
from penstock.registry.registry import Registry
from penstock.registry.weight_files import registry_url
from tests.support.run.serving_run import POLICY, ServedRun


async def test_a_late_reward_needs_no_kept_version(tmp_path: Path) -> None:
    url = registry_url(tmp_path)
    traffic = Traffic(url, POLICY, tmp_path, None, ServedRun(tmp_path).specification())
    assert traffic.look() is None
    await traffic.keep_feedback("ada", [("episode", 3, 0.5)])
    found = traffic.look()
    assert found is not None
    assert found[1] is None
    with Registry.open(url) as registry:
        kept = [(one.episode, one.step, one.amount) for one in registry.feedback(POLICY)]
    assert kept == [("episode", 3, 0.5)]


async def test_a_late_reward_is_refused_where_no_registry_can_be(tmp_path: Path) -> None:
    folder = tmp_path / "absent"
    traffic = Traffic(registry_url(folder), POLICY, folder, None, ServedRun(tmp_path).specification())
    with pytest.raises(Refused) as refused:
        await traffic.keep_feedback("ada", [("episode", 3, 0.5)])
    assert refused.value.refusal.reason is Reason.NOT_READY
