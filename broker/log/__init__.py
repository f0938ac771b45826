"""The run in Redis.

Its keys and scripts, and the operations that the broker's services and the learner perform.

Nothing in this package imports gRPC.
"""
