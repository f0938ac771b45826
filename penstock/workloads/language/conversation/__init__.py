"""Conversations as experience: turns of a model, with messages of people and tools between them."""
