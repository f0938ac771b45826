"""What every request passes before a route answers it, and what every answer has in common."""
