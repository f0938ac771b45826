"""Text that is served: answers to messages, conversations, and what of them is learned from.

text_assembly      the parts of one server, put together
text_service       the calls of text.proto
asks               what is asked, and what is answered
adapter_versions   the versions that can answer: adapters of one base model
thinking           what a model thinks before it answers
text_answerer      an answer of the chosen version, or of the model without its adapter
answer_guard       what may be asked, and what of an answer may leave
answer_text        the text of an answer while its tokens come: stops, and calls of tools
held_memory        what conversations take in memory
talk               one conversation: its siblings, its turns and what it remembers
turn_rewards       which turns rewards are for, and what they may be
conversations      all conversations of a server
column_experience  columns that are over, on their way to the learner
"""
