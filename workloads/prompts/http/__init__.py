"""The API of prompts over HTTP: `penstock gateway prompts`, port 8765.

    api_bodies      what requests hold, and what answers say
    given_answers   the last answers, which transitions are matched with
    chains          transitions that follow one another, as episodes of the policy server
    run_learning    updates, named checkpoints, figures of the run
    prompt_work     work on a text: its numbers, its mutations, what they are worth
    prompt_paths    paths of several mutations, the best one or one that is drawn
    rated_paths     paths that were shown, and what people say of them
    json_routes     the kinds of routes
    prompt_routes   the routes
    prompt_page     the page of one prompt; its files are in static
    prompts_api     what it holds while it serves
    prompts_site    the application, and what the gateway is told of it

Nothing here loads torch.
"""
