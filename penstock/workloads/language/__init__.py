"""What workloads of language models share: text, feedback, rewards, policies, generation and serving.

No module of this package imports a workload. `pip install 'penstock-rl[rlhf]'` brings what they need.
"""
