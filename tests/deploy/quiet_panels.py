"""Panels that may show only 0 in a run in which nothing goes wrong, and those that show nothing without text.

Dashboard, panel, legend and why.
"""

from collections.abc import Set as AbstractSet
from typing import Final

from deploy.grafana import queries

Key = tuple[str, str, str]

NOTHING_WRONG: Final[dict[Key, str]] = {
    ("flow", "Staged", "{{run}}"): "for a millisecond, which a look rarely meets",
    ("flow", "Repeated", "acknowledged again {{run}}"): "only for a reply lost after its append",
    ("flow", "Repeated", "given up: {{reason}} {{run}}"): "no session ends with something unacknowledged",
    ("flow", "Dropped and lost", "{{reason}} {{run}}"): "nothing is stale or damaged here",
    ("flow", "Dropped and lost", "lost with Redis {{run}}"): "Redis is not killed here",
    ("serving", "Shed", "{{run}}"): "eight clients are no load",
    ("serving", "Fallbacks", "{{run}}"): "every version can answer",
    ("serving", "Fallbacks", "{{fallback}} {{run}}"): "as above",
    ("serving", "Canaries withdrawn", "{{run}}"): "the canary is as good as the active version",
    ("serving", "Canary not judged", "{{reason}} {{run}}"): "a canary that is there is judged",
    ("serving", "Canary not judged", "undecided {{run}}"): "eight clients are fewer than the horizon",
    ("serving", "Cost of the shadow", "left out /s {{run}}"): "eight clients leave it time",
    ("training", "Updates", "skipped: {{reason}} {{run}}"): "every update is finite",
    ("fleet", "Alerts", "firing"): "none should",
    (
        "fleet",
        "Sessions and retries",
        "sessions {{run}}",
    ): "the first of a process is there before it is looked at",
    ("fleet", "What is wrong with Redis", "log closed {{run}}"): "Redis is not restarted here",
    ("fleet", "What is wrong with Redis", "cannot write {{run}}"): "its disk is not full",
    ("fleet", "What is wrong with Redis", "cannot rewrite {{run}}"): "its disk is not full",
}
OF_TEXT: Final[dict[Key, str]] = dict.fromkeys(
    (
        ("serving", f"{title} by arm", "{{arm}} {{run}}")
        for title in ("Thoughts", "Length of thoughts", "Time to think")
    ),
    "a policy of numbers does not think; see tests/learning/test_thoughts.py",
)


def nowhere(keys: AbstractSet[Key]) -> AbstractSet[Key]:
    """Those for which no dashboard has a query: a reason outlives no panel."""
    return keys - {
        (panel.dashboard, panel.title, query.legend)
        for file in queries.files()
        for panel in queries.panels(file)
        for query in panel.queries
    }
