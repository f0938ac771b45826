"""The health service before callers that are slow."""

import asyncio

from grpc_health.v1 import health_pb2 as pb

from penstock.runtime.server_frame import HealthServicer, Status


async def test_no_call_waits_for_a_watcher_that_reads_nothing() -> None:
    servicer = HealthServicer()
    await servicer.set("", Status.SERVING)
    slow, quick = (servicer.Watch(pb.HealthCheckRequest(), None) for _ in range(2))
    assert (await anext(slow)).status == (await anext(quick)).status == Status.SERVING
    async with asyncio.timeout(30):
        await servicer.set("", Status.NOT_SERVING)
        assert (await anext(quick)).status == Status.NOT_SERVING
    checked = await servicer.Check(pb.HealthCheckRequest(), None)
    assert checked.status == Status.NOT_SERVING


async def test_a_watcher_is_told_each_change_once() -> None:
    servicer = HealthServicer()
    watcher = servicer.Watch(pb.HealthCheckRequest(service="a"), None)
    assert (await anext(watcher)).status == Status.SERVICE_UNKNOWN
    coming = asyncio.ensure_future(anext(watcher))
    await servicer.set("b", Status.SERVING)
    await servicer.set("a", Status.SERVING)
    assert (await coming).status == Status.SERVING
    listed = await servicer.List(pb.HealthListRequest(), None)
    assert set(listed.statuses) == {"a", "b"}
