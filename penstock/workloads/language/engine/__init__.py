"""The engine that answers single requests: many at once, each under the version that it names."""
