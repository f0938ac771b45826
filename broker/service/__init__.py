"""The gRPC front of the log: services, admission, and what wakes the calls that wait."""
