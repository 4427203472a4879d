"""Sessions that a worker admits by measured time: the others wait in the queue, and no unit is late."""

from benchmarks.serve.fake_worker import FakeWorker
from tests.server.live_gateway import Client, run, running_gateway, wait_until
from worker.admission.session_capacity import SessionCapacity
from worker.admission.unit_cost import UnitCost

N_SLOTS, ROUNDS = 8, 20
UNIT_S = 0.2  # of a session alone; those of n sessions take n times as long


def test_twice_the_sessions_wait_and_no_unit_is_late() -> None:
    slow = 1.0
    capacity = SessionCapacity(N_SLOTS, UnitCost(0.0, UNIT_S))
    fake = FakeWorker(N_SLOTS, capacity=capacity, unit_s=lambda n: slow * UNIT_S * n)

    async def units(clients: list[Client]) -> None:
        for _ in range(ROUNDS):
            for client in clients:
                await client.unit()

    async def scenario() -> None:
        nonlocal slow
        async with fake as worker, running_gateway(worker) as gateway:
            dispatcher = gateway.gateway.dispatcher
            workers = dispatcher.workers
            served = [await (await gateway.connect(f"omni_{n}")).prepared() for n in range(4)]
            waiting = [await gateway.connect(f"omni_{n}") for n in range(4, 8)]
            for position, client in enumerate(waiting, 1):
                first = await client.receive("queued")
                assert (first["position"], first["reason"]) == (position, "busy"), first
                assert first["estimated_wait_s"] > 0, first
            await units(served)
            assert (len(worker.sessions), worker.n_late) == (4, 0), (worker.sessions, worker.n_late)

            slow = 1.25  # four sessions need the whole second, three of them less than the target
            await units(served)
            await wait_until(lambda: workers.n_slots == 3, "the lower capacity")
            assert (workers.n_excess, workers.n_free, worker.n_late) == (1, 0, 0)
            await served.pop().close()
            await wait_until(lambda: len(worker.sessions) == 3 and len(workers.leases) == 3, "the end of a session")
            report = (await gateway.http.get(f"http://127.0.0.1:{worker.port}/health")).json()["admission"]
            assert (report["mode"], report["allocated"], report["capacity"]) == ("measured", N_SLOTS, 3), report
            assert (report["excess"], report["slowdown"], report["p99_ms"]) == (0, 1.25, 1000), report
            assert len(dispatcher.queue) == 4, "the end of a session above the capacity frees no slot"

            await served.pop().close()
            served.append(await waiting.pop(0).prepared())
            await units(served)
            assert (len(worker.sessions), len(dispatcher.queue), worker.n_late) == (3, 3, 0)
            for client in [*served, *waiting]:
                await client.close()

    run(scenario)
