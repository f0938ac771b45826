"""The source of rewards that a text names: an address, an endpoint, a function, or a model's folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from penstock.config.settings import ConfigurationError
from penstock.rpc.address import is_local as is_local_address
from penstock.rpc.auth import Credentials
from penstock.workloads.language.loading import device_of
from penstock.workloads.language.reward.reward_client import DEADLINE_S, PLAINTEXT, HttpRewards, RewardClient
from penstock.workloads.language.reward.reward_source import CallableRewards, RewardSource
from penstock.workloads.language.settings import told_as

if TYPE_CHECKING:
    from penstock.workloads.language.reward.reward_model import SavedModel


def open_source(
    text: str,
    *,
    is_local: bool,
    credentials: Credentials = PLAINTEXT,
    base: str | None = None,
    device: str = "cpu",
    deadline_s: float = DEADLINE_S,
    headers: Mapping[str, str] | None = None,
) -> RewardSource:
    """Return the source that a text names.

    `is_local`: the text is of this machine's configuration, not from the wire.

    base, device: of a folder's model. deadline_s: of a call to a service or endpoint. headers: for an HTTP
    endpoint. Raises ConfigurationError for what names none, a function from the wire, or headers that would
    leave this machine in plain words.
    """
    if text.startswith(("http://", "https://")):
        if headers and text.startswith("http://") and not credentials.insecure:
            _check_plain(text)
        return HttpRewards(text, deadline_s=deadline_s, headers=headers)
    if text.startswith(("grpc://", "unix:")):
        with told_as(f"reward={text!r}", ValueError):
            address = text.removeprefix("grpc://")
            return RewardClient(address, credentials=credentials, deadline_s=deadline_s)
    if Path(text).is_dir():
        return load_model(Path(text), base=base, device=device)
    if ":" in text and "/" not in text:
        if not is_local:
            raise ConfigurationError(
                f"reward={text!r}: a function is imported only where this machine's own configuration names "
                "it"
            )
        return CallableRewards(text)
    raise ConfigurationError(
        f"reward={text!r}: name a reward model's folder, grpc://HOST:PORT, unix:/path, http(s)://…, or "
        "module:function"
    )


def load_model(folder: Path, *, base: str | None, device: str) -> "SavedModel":
    """The reward model in a folder, of one head or of several.

    base: where its base model lies now, where it has moved. device: as torch names it, or "auto". Raises
    ConfigurationError for a folder that holds none.
    """
    from penstock.workloads.language.reward.reward_model import (  # noqa: PLC0415 - loads torch
        HEADS_CARD,
        HeadsModel,
        RewardModel,
    )

    kind = HeadsModel if (folder / HEADS_CARD).exists() else RewardModel
    return kind.load(folder, base=base, device=device_of(device))


def _check_plain(url: str) -> None:
    host = urlsplit(url).hostname or ""
    if not is_local_address(f"[{host}]:80" if ":" in host else f"{host}:80"):
        raise ConfigurationError(
            f"reward={url!r}: security.http_headers_file would cross the network in plain words; use "
            "https://, or say --set security.insecure=true"
        )
