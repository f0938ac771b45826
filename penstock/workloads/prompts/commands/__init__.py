"""`penstock prompts`: embeddings of a model, served from a process of its own."""
