"""The run in Redis: keys, scripts, and what the broker's services and the learner do with them.

Speaks no gRPC.
"""
