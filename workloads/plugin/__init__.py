"""A workload imports these five modules of the processes that run it, and nothing else of actor and learner.

    fragments   cut generated experience into fragments: header fields, episodes, rewards; loads no torch
    acting      read a run, hold its policy, generate fragments, play an evaluation
    learning    build the model that a run learns, choose or add an algorithm
    recordings  read recordings, or make one of experience that no actor generated
    serving     versions that a run leaves in its folder, services of a workload's own

A workload is a `penstock.config.workload.Workload` record that an entry point of the group
`penstock.workloads` names. Beside these modules it imports `penstock.policy`, `penstock.client`,
`penstock.registry`, `penstock.runtime`, `penstock.config`, `penstock.rpc`, `penstock.wire` and `penstock.v1`;
`docs/tutorials/add-a-workload.md` shows a whole one.
"""
