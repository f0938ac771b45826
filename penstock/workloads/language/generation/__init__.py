"""The actor's side of language models: prompts → responses → rewards → fragments."""
