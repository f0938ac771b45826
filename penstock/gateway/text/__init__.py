"""OpenAI's API before servers of text: who may call, and which of them answers."""
