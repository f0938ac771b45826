"""Sections of the configuration that installed workloads add."""

from penstock.config.configuration_error import ConfigurationError
from penstock.config.plugins import entries, load
from penstock.config.sections.algorithm_section import AlgorithmSection


def algorithm_sections() -> dict[str, type[AlgorithmSection]]:
    """Return the settings sections that the installed workloads add, by `algorithm.name`.

    Raises ConfigurationError for one that cannot be imported or is no section, and where two differ under one
    name.
    """
    sections: dict[str, type[AlgorithmSection]] = {}
    for workload, name, path in entries("algorithms"):
        section = load(path)
        if not (isinstance(section, type) and issubclass(section, AlgorithmSection)):
            raise ConfigurationError(f"workload={workload!r}: {path!r} is no AlgorithmSection")
        if sections.setdefault(name, section) is not section:
            raise ConfigurationError(
                f"workload={workload!r}: another workload has another section for algorithm.name={name!r}"
            )
    return sections
