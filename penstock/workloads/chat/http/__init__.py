"""The page `/chat` of a gateway and its API: people talk to the versions of a run and rate what they say.

chat_site      the application over one run, and what the gateway is told of it
chat_routes    the calls
chat_bodies    what requests hold
chat_api       conversations with the run, and what is said of their answers
message_limit  how many messages of one person are answered in a minute
talk_record    one conversation as the page has it
kept_ratings   what people have said, in the registry
asking         which answers somebody is asked to rate
judged         what the reward model of the loop expects people to say
answer_book    which answers there were: by version, fallbacks, what was blocked; no texts
overview       satisfaction by version, by day and by person, for those who look after the chat
steering       what they decide: which version answers, whether the loop goes on

The files of the page are in static.
"""
