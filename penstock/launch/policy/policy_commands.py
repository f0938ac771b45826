"""`penstock policy`: the versions that a run has registered, and the traffic between them.

Works on the registry of a run's folder, whether the run goes on or not, or on any registry by its URL. Arms
are moved here and training is not: the learner and the policy servers of the run follow within seconds.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.protocol.limits import MAX_NUMBER
from penstock.runtime.foreground import AsJson, Trust, command, finite

if TYPE_CHECKING:
    from penstock.launch.policy.policy_versions import RegistryPolicy

policy_commands = typer.Typer(
    help="Versions that were registered: look, promote, roll back, export.", no_args_is_help=True
)

Version = Annotated[
    int, typer.Argument(metavar="VERSION", min=1, max=MAX_NUMBER, help="Number of a version.")
]
Reason = Annotated[str, typer.Option("--reason", help="Why, for the audit.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which policy of which registry is meant."""

    run: Annotated[str, typer.Argument(metavar="RUN", help="Folder of a run, or URL of a registry.")]
    registry: Annotated[
        str | None,
        typer.Option(
            "--registry",
            metavar="URL",
            help="sqlite:///FILE or postgresql://USER@HOST/DATABASE; default: what the run says.",
        ),
    ] = None
    policy: Annotated[
        str | None, typer.Option("--policy", help="Name of the policy; default: what the run says.")
    ] = None

    def found(self) -> "RegistryPolicy":
        from penstock.launch.policy.policy_versions import find_place

        return find_place(self.run, self.registry, self.policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """The changes of the traffic; None: unchanged."""

    canary_share: Annotated[
        float | None, typer.Option(callback=finite, help="Share of clients that get the canary.")
    ] = None
    latest_share: Annotated[
        float | None, typer.Option(callback=finite, help="Share that follows the learner's newest weights.")
    ] = None
    shadow: Annotated[
        int | None,
        typer.Option(min=0, max=MAX_NUMBER, help="Version that also computes each answer; 0: none."),
    ] = None
    pins: Annotated[
        tuple[str, ...],
        typer.Option("--pin", metavar="CLIENT=VERSION", help="Tie a client to a version; may be repeated."),
    ] = ()
    unpins: Annotated[
        tuple[str, ...], typer.Option("--unpin", metavar="CLIENT", help="Untie a client; may be repeated.")
    ] = ()
    experiment: Annotated[str | None, typer.Option(help="A new name deals the clients anew.")] = None


@command(policy_commands, "list")
def list_versions(place: Place, as_json: AsJson = False) -> int:
    """List the versions that were registered, oldest first."""
    from penstock.launch.policy.policy_versions import show_versions

    return show_versions(place.found(), as_json=as_json)


@command(policy_commands)
def show(version: Version, place: Place, as_json: AsJson = False) -> int:
    """Show one version, and what was decided about it."""
    from penstock.launch.policy.policy_versions import show_version

    return show_version(place.found(), version, as_json=as_json)


@command(policy_commands)
def promote(
    version: Version,
    reason: Reason,
    to: Annotated[str, typer.Option(help="active or canary.")] = "active",
    canary_share: Annotated[
        float | None,
        typer.Option(min=0, max=1, callback=finite, help="With --to canary: share of clients that get it."),
    ] = None,
    *,
    place: Place,
    as_json: AsJson = False,
) -> int:
    """Make a version active, or the canary."""
    from penstock.launch.policy.policy_versions import promote

    return promote(place.found(), version, to=to, canary_share=canary_share, reason=reason, as_json=as_json)


@command(policy_commands)
def rollback(
    reason: Reason,
    version: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_NUMBER,
            help="Version to withdraw; default: the canary if there is one, else the active one.",
        ),
    ] = None,
    *,
    place: Place,
    as_json: AsJson = False,
) -> int:
    """Withdraw the canary, or the active version for the one before it."""
    from penstock.launch.policy.policy_versions import rollback

    return rollback(place.found(), version, reason=reason, as_json=as_json)


@command(policy_commands)
def retire(version: Version, reason: Reason, place: Place, as_json: AsJson = False) -> int:
    """Release a version's weights: no client can be served it any more."""
    from penstock.launch.policy.policy_versions import retire

    return retire(place.found(), version, reason=reason, as_json=as_json)


@command(policy_commands)
def traffic(
    wish: Wish,
    reason: Annotated[str, typer.Option("--reason", help="Why, for the audit; needed for a change.")] = "",
    *,
    place: Place,
    as_json: AsJson = False,
) -> int:
    """Show which clients get which version, or change it."""
    from penstock.launch.policy.policy_versions import traffic

    return traffic(place.found(), wish, reason=reason, as_json=as_json)


@command(policy_commands)
def export(
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")],
    version: Annotated[
        int | None,
        typer.Argument(
            metavar="[VERSION]", min=1, max=MAX_NUMBER, help="Number; default: the active version."
        ),
    ] = None,
    kind: Annotated[str, typer.Option("--format", help="safetensors or onnx.")] = "safetensors",
    *,
    place: Place,
    trust: Trust = False,
) -> int:
    """Write a version's weights, or the whole network, to a file."""
    from penstock.launch.policy.policy_versions import export

    return export(place.found(), version, kind=kind, output=output, trust=trust)
