"""The dashboards, as code.

`python -m deploy.grafana` writes the JSON files beside this one that Grafana reads.
"""
