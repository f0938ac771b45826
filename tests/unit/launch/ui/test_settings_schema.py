"""The schema that the form is made from: whole, and with its lines of help."""

import json
from typing import Any

from penstock.config.algorithm_sections import SECTIONS
from penstock.config.settings import Settings
from penstock.launch.ui.run_starter import settings_schema


def properties(schema: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Every setting in it, sections in sections too."""
    found = list[tuple[str, dict[str, Any]]]()
    for name, one in schema["properties"].items():
        found += properties(one) if "properties" in one else [(name, one)]
    return found


def test_every_setting_is_there_with_its_line_of_help() -> None:
    schema = settings_schema()
    assert set(schema["properties"]) == set(Settings.model_fields)
    assert set(SECTIONS) <= set(schema["algorithms"])
    sections = [schema, *schema["algorithms"].values()]
    told = [(name, one["description"]) for section in sections for name, one in properties(section)]
    assert len(told) > 150
    assert [name for name, text in told if not text] == []
    learner = schema["properties"]["learner"]["properties"]
    assert learner["total_steps"]["advanced"] is False
    assert schema["algorithms"]["ppo"]["properties"]["dual_clip"]["advanced"] is True
    assert "Passes over each batch" in schema["algorithms"]["ppo"]["properties"]["epochs"]["description"]
    json.dumps(schema, allow_nan=False)
