"""Conversations as experience: turns of a model, with messages of people and tools between them.

chat_encoder         messages and tools as token ids, and what is put behind sampled ids
column               a conversation as one column of a fragment: its ids, which were sampled, what they earned
column_fragments     columns as one fragment
live_conversation    a conversation under way: it goes on, is rewarded, and is cut into columns
"""
