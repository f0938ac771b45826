"""What is raised for a configuration that cannot be used."""


class ConfigurationError(ValueError):
    """A configuration that cannot be used; the message names key, value and remedy."""
