"""Broker: the gRPC front of the experience log, and the only code that speaks to Redis."""
