"""The supervised base of a chat: a model that has learned conversations, before anybody rates it."""
