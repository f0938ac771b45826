"""Between messages of the protocol and arrays."""
