"""The supervised base of a chat: a model that has learned conversations, before anybody rates it.

conversation_files      conversations of files, in three forms
packaged_conversations  those of a package
known_answers           how near an answer is to those of the package
supervised_rows         a conversation as token ids, and which of them are learned
supervised_base         the training, and its folder
"""
