"""The calls of the gateway, by what they are about."""
