"""Guardrails outside the policy: what may be said to it, and what of it may be said to people.

    verdict            whether a text is blocked, and by what
    guard_rules        patterns, built in and of one's own
    text_classifier    a small classifier of texts, and its file
    guard_files        the files that a run names, read as one
    guard_rows         texts to train it on: packaged ones, or a file
    guard_training     the training, with recall and false alarms on texts that were held out
    guard              rules and classifier as one; an error blocks
    held_text          an answer that streams: nothing leaves before its sentence was checked

No policy is asked and none is needed, and nothing here loads torch.
"""
