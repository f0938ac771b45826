"""The run in Redis: its keys and scripts, and what the services and the learner do with them. No gRPC."""
