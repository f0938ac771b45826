"""The reward model, the service that scores with it, and other places that rewards come from."""
