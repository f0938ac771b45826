"""Configuration of Prometheus for Penstock: rules and alerts."""
