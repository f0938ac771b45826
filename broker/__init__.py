"""The broker: the experience log in Redis (`log`) and its gRPC front (`service`)."""
