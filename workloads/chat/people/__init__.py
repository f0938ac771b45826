"""Simulated people who chat and rate.

    chat_texts      prompts and responses of a small language, and the six attributes that a response has
    taste           what people like, as weights of the attributes, and what they say by chance
    population      people: who rates what, how, when; liars, and one who floods
    users           somebody in a conversation: what they ask next

It draws and computes; nothing in it learns, and it knows no model.
"""
