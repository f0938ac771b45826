"""A workload imports these five modules of the processes that run it, and nothing else of actor and learner.

A workload is a `penstock.config.workload.Workload` record that an entry point of the group
`penstock.workloads` names. Beside these modules it imports `penstock.policy`, `penstock.client`,
`penstock.registry`, `penstock.runtime`, `penstock.config`, `penstock.rpc`, `penstock.protocol` and
`penstock.v1`; `docs/tutorials/add-a-workload.md` shows a whole one.
"""
