"""Volumes as folders, and what secrets and configuration say to variables."""

import base64
import re
from pathlib import Path

from tests.deploy.manifests import Object, Workload


def expand(word: str, environment: dict[str, str]) -> str:
    """`$(NAME)` in a command or argument, as Kubernetes does it: an unknown name stays."""
    return re.sub(r"\$\((\w+)\)", lambda match: environment.get(match[1], match[0]), word)


class Volumes:
    """The storage of a node. secrets, maps: content by name and key."""

    def __init__(self, work: Path, objects: tuple[Object, ...], secrets: dict[str, dict[str, bytes]]) -> None:
        self._work = work
        self.secrets = dict(secrets)
        self._maps: dict[str, dict[str, bytes]] = {}
        for one in objects:
            name = one["metadata"]["name"]
            if one["kind"] == "ConfigMap":
                self._maps[name] = {key: text.encode() for key, text in one["data"].items()}
            elif one["kind"] == "Secret":
                self.secrets[name] = {key: base64.b64decode(text) for key, text in one["data"].items()}

    def value(self, variable: Object, fields: dict[str, str]) -> str:
        if "value" in variable:
            return str(variable["value"])
        ((kind, reference),) = variable["valueFrom"].items()
        if kind == "fieldRef":
            return fields[reference["fieldPath"]]
        content = self.secrets if kind == "secretKeyRef" else self._maps
        return content[reference["name"]][reference["key"]].decode()

    def claim(self, pod: str, name: str) -> Path:
        """Where the data of a pod's own claim lie."""
        return self._folder(f"claim-{pod}-{name}")

    def source(self, workload: Workload, pod: str, mount: Object) -> Path:
        """What is mounted: the volume, or with `subPath` what is in it, else a new folder."""
        folder = self._volume(workload, pod, mount["name"])
        path = folder / str(mount.get("subPath", ""))
        if not path.exists():
            path.mkdir()
            path.chmod(folder.stat().st_mode)
        return path

    def _volume(self, workload: Workload, pod: str, name: str) -> Path:
        if name in {claim["metadata"]["name"] for claim in workload.claims}:
            return self.claim(pod, name)
        (volume,) = [one for one in workload.spec["volumes"] if one["name"] == name]
        if "persistentVolumeClaim" in volume:
            return self._folder(f"claim-{volume['persistentVolumeClaim']['claimName']}")
        folder = self._folder(f"{pod}-{name}")
        if "projected" in volume:
            for source in volume["projected"]["sources"]:
                self._write(folder, self.secrets[source["secret"]["name"]], source["secret"].get("items"))
        elif "secret" in volume:
            self._write(folder, self.secrets[volume["secret"]["secretName"]], volume["secret"].get("items"))
        elif "configMap" in volume:
            self._write(folder, self._maps[volume["configMap"]["name"]], None)
        else:
            assert "emptyDir" in volume, volume
        return folder

    def _folder(self, name: str) -> Path:
        path = self._work / "volumes" / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def _write(self, folder: Path, content: dict[str, bytes], items: list[Object] | None) -> None:
        wanted = items or [{"key": key, "path": key} for key in content]
        for item in wanted:
            path = folder / item["path"]
            if not path.exists():
                path.write_bytes(content[item["key"]])
                path.chmod(0o440)
