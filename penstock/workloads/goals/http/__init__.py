"""The page of goals in a gateway, at `/rl`, and the routes behind it.

goals_service      the routes, and who may call them
goals_answers      what they answer, as the document has it
injector_folders   the injectors of a project, as folders of the gateway's machine
"""
