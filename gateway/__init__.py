"""HTTP with people behind it: accounts, projects, feedback and jobs, in front of what Penstock learns.

    process         the process
    http_server     serves HTTP
    application     the routes behind the frame
    frame           what every request passes: hosts, sizes, rates, who may call which route, errors
    jobs            trainings that people ask for
    accounts        users, projects, tokens, sessions and the audit
    store           the gateway's own database
    feedback        what callers say of responses, and the forms in which it comes and goes
    routes          the calls, by what they are about
    satisfaction    how content people are with the versions of an agent
    text            OpenAI's chat completions over a server of text
    sites           an API of a workload's own over one run
    personal        the gateway of one person, without accounts: runs of a folder, live
    surface         what routes of workloads import
    people_metrics  requests, ratings and jobs as metrics
    event_text      how a server-sent event is written

The gateway knows no workload, and neither torch nor Redis. What lies above it is handed in by `launch`.
"""
