"""The file that says where on a cluster trainings run, for `penstock gateway --runner kubernetes`.

namespace = "penstock-gateway"
image = "registry.example/penstock-trainer:0.1.0"
claim = "state"                        # PersistentVolumeClaim that all share: ReadWriteMany
claim_folder = "jobs"                  # where in it the jobs lie: `jobs`, where the claim is the --state
service_account = "trainer"            # of the trainings; it needs no rights
registry_secret = "database"           # Secret whose key `password` is that of the registry; left out: none
grace_s = 300                          # seconds that a cancelled training has to write what it has
start_s = 600                          # seconds after which a pod that cannot begin is given up

[requests]
cpu = "2"
memory = "4Gi"

[limits]
cpu = "4"
memory = "8Gi"

[node_selector]                        # left out: any node
pool = "training"
"""

import re
import tomllib
from pathlib import Path
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from penstock.config.configuration_error import ConfigurationError

_NAME: Final = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
_QUANTITY: Final = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?")
_BOUNDED: Final = frozenset({"cpu", "memory"})

Name = Annotated[str, Field(pattern=_NAME)]


class Cluster(BaseModel):
    """Says where on a cluster trainings run, as what, and with how much; the fields are those of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    namespace: Name
    image: Annotated[str, Field(pattern=r"^\S{1,512}$")]
    claim: Name
    claim_folder: Annotated[str, Field(pattern=r"^([A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*)?$")] = ""
    service_account: Name = "trainer"
    registry_secret: Name | None = None
    grace_s: Annotated[int, Field(ge=1, le=3600)] = 300
    start_s: Annotated[int, Field(ge=1, le=86_400)] = 600
    requests: dict[str, str]
    limits: dict[str, str]
    node_selector: dict[str, str] = Field(default_factory=dict)

    @field_validator("requests", "limits")
    @classmethod
    def _are_amounts(cls, said: dict[str, str]) -> dict[str, str]:
        missing = ", ".join(sorted(_BOUNDED - said.keys()))
        if missing:
            raise ValueError(f"say {missing}, too: no training may take a whole node")
        for what, amount in said.items():
            if not _QUANTITY.fullmatch(amount):
                raise ValueError(f'{what}={amount!r}: use an amount such as "500m", "2" or "4Gi"')
        return said

    @field_validator("image")
    @classmethod
    def _is_one_image(cls, image: str) -> str:
        if "@sha256:" not in image and image.rpartition("/")[2].partition(":")[2] in {"", "latest"}:
            raise ValueError(
                "name a tag other than `latest`, or a digest: a training must not change its code"
            )
        return image


def read_cluster(file: Path) -> Cluster:
    """Return what a file says; raises ConfigurationError that names what is wrong in it."""
    try:
        return Cluster.model_validate(tomllib.loads(file.read_text()))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise ConfigurationError(f"--cluster {file}: {field}: {first['msg']}") from error
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--cluster {file}: cannot be read as TOML: {error}") from error
