"""What Prometheus is told of Penstock."""
