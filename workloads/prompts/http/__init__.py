"""The API of prompts over HTTP: `penstock gateway prompts`, port 8765.

    api_bodies      what requests hold, and what answers say
    given_answers   the last answers, which transitions are matched with
    chains          transitions that follow one another, as episodes of the policy server
    run_learning    updates, named checkpoints, figures of the run
    prompt_routes   the routes
    prompts_api     what it holds while it serves
    prompts_site    the application, and what the gateway is told of it

Nothing here loads torch.
"""
