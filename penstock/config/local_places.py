"""Where this machine has what a run of its own names.

The user named it here, so the actors that this launcher starts may use it.
"""

from penstock.config.settings import Settings
from penstock.config.workload import find


def places_of(settings: Settings) -> dict[str, str]:
    """Return `actor.places` for this machine's actors: what the run names, and over it what was said."""
    named = {**settings.policy.kwargs, **settings.environment.kwargs}
    keys = find(settings.workload).places
    return {key: str(named[key]) for key in keys if named.get(key)} | settings.actor.places
