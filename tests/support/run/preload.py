"""The large libraries of the services, imported and not used."""

import faulthandler  # noqa: F401
import tomllib  # noqa: F401
import zoneinfo  # noqa: F401

import torch  # noqa: F401
