"""`penstock policy`: the versions that a run has registered, and the traffic between them.

Works on the registry of a run's folder, whether the run goes on or not, or on any registry by its URL. Arms
are moved here and training is not: the learner and the policy servers of the run follow within seconds.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.protocol.limits import MAX_NUMBER
from penstock.runtime.foreground import AsJson, Trust, finish, finite

if TYPE_CHECKING:
    from penstock.launch.policy.policy_view import RegistryPolicy

policy_commands = typer.Typer(
    help="Versions that were registered: look, promote, roll back, export.", no_args_is_help=True
)

RunOrRegistry = Annotated[str, typer.Argument(metavar="RUN", help="Folder of a run, or URL of a registry.")]
RegistryUrl = Annotated[
    str | None,
    typer.Option(
        "--registry",
        metavar="URL",
        help="sqlite:///FILE or postgresql://USER@HOST/DATABASE; default: what the run says.",
    ),
]
PolicyName = Annotated[
    str | None, typer.Option("--policy", help="Name of the policy; default: what the run says.")
]
Version = Annotated[
    int, typer.Argument(metavar="VERSION", min=1, max=MAX_NUMBER, help="Number of a version.")
]
Reason = Annotated[str, typer.Option("--reason", help="Why, for the audit.")]


@policy_commands.command("list")
def list_versions(
    run: RunOrRegistry, registry: RegistryUrl = None, policy: PolicyName = None, as_json: AsJson = False
) -> None:
    """List the versions that were registered, oldest first."""

    def body() -> int:
        from penstock.launch.policy.policy_view import show_versions

        return show_versions(_place(run, registry, policy), as_json=as_json)

    finish(body)


@policy_commands.command()
def show(
    run: RunOrRegistry,
    version: Version,
    registry: RegistryUrl = None,
    policy: PolicyName = None,
    as_json: AsJson = False,
) -> None:
    """Show one version, and what was decided about it."""

    def body() -> int:
        from penstock.launch.policy.policy_view import show_version

        return show_version(_place(run, registry, policy), version, as_json=as_json)

    finish(body)


@policy_commands.command()
def promote(
    run: RunOrRegistry,
    version: Version,
    reason: Reason,
    to: Annotated[str, typer.Option(help="active or canary.")] = "active",
    canary_share: Annotated[
        float | None,
        typer.Option(min=0, max=1, callback=finite, help="With --to canary: share of clients that get it."),
    ] = None,
    registry: RegistryUrl = None,
    policy: PolicyName = None,
    as_json: AsJson = False,
) -> None:
    """Make a version active, or the canary."""

    def body() -> int:
        from penstock.launch.policy.policy_steering import promote

        place = _place(run, registry, policy)
        return promote(place, version, to=to, canary_share=canary_share, reason=reason, as_json=as_json)

    finish(body)


@policy_commands.command()
def rollback(
    run: RunOrRegistry,
    reason: Reason,
    version: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_NUMBER,
            help="Version to withdraw; default: the canary if there is one, else the active one.",
        ),
    ] = None,
    registry: RegistryUrl = None,
    policy: PolicyName = None,
    as_json: AsJson = False,
) -> None:
    """Withdraw the canary, or the active version for the one before it."""

    def body() -> int:
        from penstock.launch.policy.policy_steering import rollback

        return rollback(_place(run, registry, policy), version, reason=reason, as_json=as_json)

    finish(body)


@policy_commands.command()
def retire(
    run: RunOrRegistry,
    version: Version,
    reason: Reason,
    registry: RegistryUrl = None,
    policy: PolicyName = None,
    as_json: AsJson = False,
) -> None:
    """Release a version's weights: no client can be served it any more."""

    def body() -> int:
        from penstock.launch.policy.policy_steering import retire

        return retire(_place(run, registry, policy), version, reason=reason, as_json=as_json)

    finish(body)


@policy_commands.command()
def traffic(
    run: RunOrRegistry,
    canary_share: Annotated[
        float | None, typer.Option(callback=finite, help="Share of clients that get the canary.")
    ] = None,
    latest_share: Annotated[
        float | None, typer.Option(callback=finite, help="Share that follows the learner's newest weights.")
    ] = None,
    shadow: Annotated[
        int | None,
        typer.Option(min=0, max=MAX_NUMBER, help="Version that also computes each answer; 0: none."),
    ] = None,
    pins: Annotated[
        list[str] | None,
        typer.Option("--pin", metavar="CLIENT=VERSION", help="Tie a client to a version; may be repeated."),
    ] = None,
    unpins: Annotated[
        list[str] | None, typer.Option("--unpin", metavar="CLIENT", help="Untie a client; may be repeated.")
    ] = None,
    experiment: Annotated[str | None, typer.Option(help="A new name deals the clients anew.")] = None,
    reason: Annotated[str, typer.Option("--reason", help="Why, for the audit; needed for a change.")] = "",
    registry: RegistryUrl = None,
    policy: PolicyName = None,
    as_json: AsJson = False,
) -> None:
    """Show which clients get which version, or change it."""

    def body() -> int:
        from penstock.launch.policy.policy_steering import Wish, traffic

        wish = Wish(
            canary_share=canary_share,
            latest_share=latest_share,
            shadow=shadow,
            pins=tuple(pins or ()),
            unpins=tuple(unpins or ()),
            experiment=experiment,
        )
        return traffic(_place(run, registry, policy), wish, reason=reason, as_json=as_json)

    finish(body)


@policy_commands.command()
def export(
    run: RunOrRegistry,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")],
    version: Annotated[
        int | None,
        typer.Argument(
            metavar="[VERSION]", min=1, max=MAX_NUMBER, help="Number; default: the active version."
        ),
    ] = None,
    kind: Annotated[str, typer.Option("--format", help="safetensors or onnx.")] = "safetensors",
    registry: RegistryUrl = None,
    policy: PolicyName = None,
    trust: Trust = False,
) -> None:
    """Write a version's weights, or the whole network, to a file."""

    def body() -> int:
        from penstock.launch.policy.policy_view import export

        return export(_place(run, registry, policy), version, kind=kind, output=output, trust=trust)

    finish(body)


def _place(run: str, registry: str | None, policy: str | None) -> "RegistryPolicy":
    from penstock.launch.policy.policy_view import find_place

    return find_place(run, registry, policy)
