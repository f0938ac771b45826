"""How it is said and by whom.

Channels, servers, identity, tokens, the gate that every call passes, rate limits.
"""
