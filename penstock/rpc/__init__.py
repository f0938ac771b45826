"""How it is said and by whom: channels, servers, identity, tokens, the gate that every call passes, rate limits."""
