"""Language models: feedback trains a reward model, whose scores train a policy that writes responses.

    feedback/   examples of prompt, response and score, or of two responses of which one is better
    reward/     the reward model: training, scores, the service that gives them, and other sources of rewards
    tokens      text to token ids
    tiny        a model small enough to be built, and trained, in a test
    sentiment   a task whose true reward and best policy are known

Importing this package imports nothing heavy; `pip install 'penstock[rlhf]'` brings what the modules need.
"""
