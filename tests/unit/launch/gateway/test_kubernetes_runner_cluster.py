"""The file that describes a cluster: what is wrong in it is named before anything is begun."""

from pathlib import Path

import pytest

from penstock.config.configuration_error import ConfigurationError
from penstock.launch.gateway.kubernetes_runner import read_cluster

BOUNDS = '[requests]\ncpu = "1"\nmemory = "1Gi"\n[limits]\ncpu = "2"\nmemory = "2Gi"\n'
HEAD = 'namespace = "trainings"\nimage = "penstock-trainer:0.1.0"\nclaim = "state"\n'


def test_what_is_left_out_has_a_default(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(HEAD + BOUNDS)
    found = read_cluster(tmp_path / "cluster.toml")
    assert (found.service_account, found.registry_secret, found.claim_folder) == ("trainer", None, "")
    assert found.limits == {"cpu": "2", "memory": "2Gi"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("namespace = ", "cannot be read as TOML"),
        (BOUNDS, "namespace: Field required"),
        (HEAD, "requests: Field required"),
        (HEAD + 'pod = "x"\n' + BOUNDS, "pod: Extra inputs"),
        (HEAD.replace("trainings", "Kube_System") + BOUNDS, "namespace: String should match"),
        (HEAD.replace('"state"', '"../state"') + BOUNDS, "claim: String should match"),
        (HEAD + 'claim_folder = "../other"\n' + BOUNDS, "claim_folder: String should match"),
        (HEAD.replace(":0.1.0", ":latest") + BOUNDS, "image: Value error, name a tag"),
        (HEAD.replace(":0.1.0", "") + BOUNDS, "image: Value error, name a tag"),
        (HEAD + BOUNDS.replace('memory = "2Gi"', ""), "limits: Value error, say memory"),
        (HEAD + BOUNDS.replace('"2Gi"', '"much"'), "limits: Value error, memory='much'"),
        (HEAD + "grace_s = 0\n" + BOUNDS, "grace_s: Input should be greater"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        read_cluster(file)
    assert str(caught.value).startswith(f"--cluster {file}: {told}")


def test_no_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="absent.toml: cannot be read"):
        read_cluster(tmp_path / "absent.toml")
