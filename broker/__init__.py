"""Broker: the experience log in Redis (`broker.log`) and its gRPC front (`broker.service`)."""
