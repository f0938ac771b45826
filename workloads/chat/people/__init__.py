"""Simulated people who chat and rate, and the best that anybody could tell of what they will say.

    chat_texts      prompts and responses of a small language, and the six attributes that a response has
    taste           what people like, as weights of the attributes, and what they say by chance
    population      people: who rates what, how, when; liars, and one who floods
    users           somebody in a conversation: what they ask next
    ceilings        Bayes ceilings, and what a model reaches of them, from the definition

It draws and computes; nothing in it learns, and it knows no model.
"""
