"""The policy that writes: a causal language model, what of it is trained, and what is published."""
