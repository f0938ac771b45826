"""Transport and identity of calls.

Addresses (without gRPC), channels, servers, identity, tokens, the gate that every call passes, rate limits.
"""
