"""The run whose chat is made better: its settings, its registry, and the version that answers people."""

from dataclasses import dataclass
from pathlib import Path

from penstock.config.configuration_error import ConfigurationError
from penstock.config.credentials import registry_with_password
from penstock.config.run_folder import CONFIG_FILE
from penstock.config.run_seal import check_own
from penstock.config.settings import Settings, load, parse_toml
from penstock.registry.records import PolicyVersion, Status
from penstock.registry.registry import Registry
from penstock.registry.weight_files import read_kept, registry_url


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRun:
    """A run by its folder, absolute. url: of its registry, with the password that a connection needs."""

    folder: Path
    settings: Settings
    url: str

    @property
    def policy(self) -> str:
        """Return the name under which its versions are registered."""
        return self.settings.serving.policy

    @property
    def model(self) -> str:
        """Return the folder of its base model."""
        return str(self.settings.environment.kwargs["model"])

    def weights(self, version: PolicyVersion) -> bytes:
        """Return the weights of a version; raises ValueError for those that are not here, or damaged."""
        place = Path(version.place) if version.place else self.folder
        return read_kept(place, version.version, version.sha256)


def read_run(folder: Path) -> ServedRun:
    """Return the run in a folder.

    Raises ConfigurationError for a folder that holds none, that was not made here, or no language model's.
    """
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise ConfigurationError(f"{folder}: no folder of a run; name one, such as chat-state/run")
    settings = load([parse_toml(file)])
    check_own(folder, settings, (), "start the loop where, and as whom, the run was made")
    if not settings.environment.kwargs.get("model") or settings.algorithm.name != "token_ppo":
        raise ConfigurationError(
            f"{folder}: is a run of workload {settings.workload!r} by {settings.algorithm.name!r}: the loop "
            "trains language models by token_ppo (docs/rlhf.md)"
        )
    url = registry_url(folder, registry_with_password(settings.registry))
    return ServedRun(folder=folder.absolute(), settings=settings, url=url)


def serving_version(registry: Registry, policy: str, *, by: str) -> PolicyVersion | None:
    """Return the version that answers people, made active first where none is; None: none is registered.

    A canary is judged against an active version, and the newest one that is registered becomes that.
    """
    active = registry.active(policy)
    if active is not None:
        return active
    candidates = registry.list(policy, Status.CANDIDATE)
    if not candidates:
        return None
    reason = "what the loop begins with: canaries are judged against an active version"
    return registry.promote(policy, candidates[-1].version, reason, by=by)
