"""Transport and identity of calls.

Channels, servers, identity, tokens, the gate that every call passes, rate limits.
"""
