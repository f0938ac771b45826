"""The policy that writes: a causal language model, what of it is trained, and what is published.

policy_section   what `policy.kwargs` says
adapter_network  the network, with or without an adapter
critic           what values are made by
language_policy  all of it, as learners and actors ask it
"""
