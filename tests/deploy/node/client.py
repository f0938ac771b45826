"""A client of the policy server.

In a pod with the label and the certificate of one, it calls the Service by its name.

It plays short episodes of CartPole until the node ends, at a leisure that leaves the processors to the run;
nothing of it is learned from.
"""

from typing import Final

from tests.deploy.manifests import Object, Workload, workloads

_PLAY: Final = """
import time
from pathlib import Path
import gymnasium as gym
from penstock import Credentials, ExternalEnvironment, PolicyClient, PolicyError

class Leisurely(gym.Wrapper):
    def step(self, action):
        time.sleep(0.05)
        return super().step(action)

credentials = Credentials.from_files(insecure=False, **{
    name: Path(f"/certificates/{file}")
    for name, file in {"certificate": "own.pem", "key": "own.key", "authority": "authority.pem"}.items()
})
while True:
    try:
        with PolicyClient("server.penstock.svc:50052", credentials=credentials) as client:
            environment = Leisurely(gym.make("CartPole-v1", max_episode_steps=30))
            for _ in ExternalEnvironment(client, learned=False).run(environment, 1000000):
                pass
    except PolicyError as error:  # no server is ready yet
        print(error, flush=True)
        time.sleep(0.5)
"""
_FILES: Final = ("own.pem", "own.key", "authority.pem")


PLAYED: Final = "sum(rate(penstock_policy_episode_return_count[10s])) > 0"
"""Prometheus has seen some episodes of it."""


def runner(objects: tuple[Object, ...]) -> Workload:
    """As the overlay keeps certificates: all on one volume, as `local` does, or each in a secret."""
    (actor,) = [one for one in workloads(objects) if one.name == "actor"]
    mount: Object = {"name": "certificates", "mountPath": "/certificates", "readOnly": True}
    volume: Object = {"name": "certificates"}
    waiting = actor.spec.get("initContainers", [])
    if waiting:
        names = dict(zip(_FILES, ("client.pem", "client.key", "authority.pem"), strict=True))
        mounts = [{**mount, "mountPath": f"/certificates/{own}", "subPath": names[own]} for own in _FILES]
        volume["persistentVolumeClaim"] = {"claimName": "certificates"}
    else:
        keys = dict(zip(_FILES, ("tls.crt", "tls.key", "ca.crt"), strict=True))
        mounts = [mount]
        items = [{"key": keys[own], "path": own} for own in _FILES]
        volume["secret"] = {"secretName": "client-certificate", "items": items}
    container = {
        **{key: actor.spec["containers"][0][key] for key in ("image", "securityContext")},
        "name": "client",
        "command": ["python", "-c", _PLAY],
        "volumeMounts": mounts,
    }
    spec = {
        "securityContext": actor.spec["securityContext"],
        "initContainers": waiting,
        "containers": [container],
        "volumes": [volume],
    }
    template = {"metadata": {"labels": {"penstock-client": "true"}}, "spec": spec}
    return Workload(kind="Job", name="client", replicas=1, template=template)
