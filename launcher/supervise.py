"""Keeps the gateway and the workers running until it is told to stop, then stops them in order.

Knows processes by their exit and by what they answer over HTTP. Does not know models, GPUs or settings: a plan says
what runs, a policy how patient to be.
"""

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from launcher.addresses import own_addresses
from launcher.managed_process import ChildProcess, Program, ending
from launcher.plan import LaunchPlan
from launcher.progress import Board, LiveLine, n_slots, ready_text, starting_line, totals_text
from launcher.restart_policy import HealthTimeout, Policy, RestartBackoff, Verdict

READY = ("IDLE", "BUSY")
TOGETHER_S = 0.5
POLL_S = 0.05  # between two looks at processes that are to end
FAILED_GRACE_S = 5.0  # for a worker that broke down to go by itself


@dataclass
class ManagedProcess:
    """One process under care.

    is_ready: it serves. is_open: of the gateway, it takes sessions. body: its last /health. is_given_up: it is not
    started again.
    """

    program: Program
    child: ChildProcess
    backoff: RestartBackoff
    is_ready: bool = False
    is_open: bool = False
    is_given_up: bool = False
    started_at: float = 0.0
    body: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.program.name

    @property
    def is_settled(self) -> bool:
        """Whether there is nothing to wait for at the start."""
        return self.is_ready or self.is_given_up or self.backoff.n_failed > 0


@dataclass(frozen=True)
class ProbeResult:
    """What a process said over HTTP. status: 0 if it did not answer."""

    status: int = 0
    body: dict[str, Any] = field(default_factory=dict)


class Supervisor:
    """All processes of a plan. `run` on the main thread: children are tied to it."""

    def __init__(
        self, plan: LaunchPlan, board: Board, policy: Policy | None = None, clock: Callable[[], float] = time.monotonic
    ):
        self.failure = ""  # why it ended, if it was not told to
        self._plan, self._board, self._clock = plan, board, clock
        self._policy = policy or Policy()
        self._gateway = self._managed(plan.gateway)
        self._workers = [self._managed(program) for program in plan.workers]
        self._over, self._hurry = asyncio.Event(), asyncio.Event()
        self._told_at: float | None = None
        self._is_announced = False

    def _managed(self, program: Program) -> ManagedProcess:
        return ManagedProcess(
            program, ChildProcess(program, self._plan.folder, self._plan.root), RestartBackoff(self._policy)
        )

    @property
    def _all(self) -> list[ManagedProcess]:
        return [self._gateway, *self._workers]

    async def run(self) -> int:
        """Start everything, and return when all of it has ended. Returns: 0 if told to stop, 1 after a failure."""
        self._listen_to_signals()
        for process in self._all:
            process.child.clear_log()
        limits = httpx.Limits(max_keepalive_connections=0)  # a question a second needs none, and none outlives its end
        client = httpx.AsyncClient(verify=False, trust_env=False, timeout=self._policy.answer_s, limits=limits)
        try:
            async with client:
                caring = [asyncio.create_task(self._care(process, client), name=process.name) for process in self._all]
                for task in caring:
                    task.add_done_callback(self._cared)
                await self._over.wait()
                for task in caring:
                    task.cancel()
                await asyncio.gather(*caring, return_exceptions=True)
            await self._stop_all()
        finally:
            self._kill_all()
        return 1 if self.failure else 0

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._told_to_stop)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
            loop.add_signal_handler(signal.SIGHUP, self._over.set)  # a terminal that closes sends more than one

    def _told_to_stop(self) -> None:
        """A second one hurries; terminals and wrappers may send two for one wish, which come together."""
        now = self._clock()
        if self._told_at is not None and now - self._told_at > TOGETHER_S:
            self._hurry.set()
        if self._told_at is None:
            self._told_at = now
        self._over.set()

    def _cared(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(f"the launcher itself failed at {task.get_name()}: {type(error).__name__}: {error}")

    def _fail(self, why: str) -> None:
        self.failure = self.failure or why
        self._over.set()

    # --- one process ---------------------------------------------------------------------------

    async def _care(self, process: ManagedProcess, client: httpx.AsyncClient) -> None:
        """Start it, watch it, and start it again, until it is given up."""
        while True:
            process.started_at = self._clock()
            try:
                process.child.start()
                why = await self._watch(process, client)
            except OSError as error:
                why = f"could not be started: {error}"
            process.is_ready = process.is_open = False
            self._board.drop(process.name)
            status = process.child.poll()
            words = process.child.last_words()
            told = f"{why or f'ended with {ending(status or 0)}'}{f': {words}' if words and not why else ''}"
            if process.backoff.ended(None if why else status, self._clock()) is Verdict.GIVE_UP:
                self._give_up(process, told)
                return
            wait = process.backoff.wait_s()
            self._board.say(f"{process.name} {told}; starting it again in {wait:g} s")
            self._announce()
            await asyncio.sleep(wait)

    async def _watch(self, process: ManagedProcess, client: httpx.AsyncClient) -> str:
        """Until it has ended. Returns: why it was killed, empty if it ended by itself."""
        health_timeout = HealthTimeout(self._policy)
        is_gateway = process is self._gateway
        while process.child.is_running:
            path = "/readyz" if is_gateway else "/livez" if process.is_ready else "/health"
            answer = await self._ask(client, process.program.url + path)
            if answer.status and not process.is_ready and not process.child.listens_on(process.program.port):
                answer = ProbeResult()  # somebody else's
            if is_gateway:
                self._heard_gateway(process, answer)
            elif not process.is_ready:
                self._heard_start(process, answer)
            elif answer.status == 503:
                await self._end([process], FAILED_GRACE_S)
                return f"broke down: {answer.body.get('error') or 'it does not say why'}"
            if health_timeout.asked(bool(answer.status), self._clock()) and process.is_ready:
                await self._end([process], 0)
                return f"has not answered for {self._policy.hung_s:g} s and was killed"
            is_calm = process.is_ready and (process.is_open or not is_gateway)
            await asyncio.sleep(self._policy.serving_poll_s if is_calm else self._policy.starting_poll_s)
        return ""

    async def _ask(self, client: httpx.AsyncClient, url: str) -> ProbeResult:
        try:
            response = await client.get(url)
        except (httpx.HTTPError, OSError):
            return ProbeResult()
        body: Any = None
        with suppress(ValueError):
            body = response.json()
        return ProbeResult(response.status_code, body if isinstance(body, dict) else {})

    def _heard_gateway(self, process: ManagedProcess, answer: ProbeResult) -> None:
        process.is_open = answer.status == 200
        if not answer.status:
            return
        if not process.is_ready:
            process.is_ready = True
            again, loading = process.backoff.was_ready, not any(worker.is_ready for worker in self._workers)
            process.backoff.ready(self._clock())
            state = " again" if again else ", while the model loads" if loading else ""
            self._board.say(f"gateway  answers at {self._plan.url()}{state}")
        self._announce()

    def _heard_start(self, process: ManagedProcess, answer: ProbeResult) -> None:
        seconds = self._clock() - process.started_at
        body = answer.body if answer.status == 200 else None
        if body is None or body.get("state") not in READY:
            self._board.show(process.name, starting_line(self._label(process), body, seconds))
            return
        process.is_ready, process.body = True, body
        process.backoff.ready(self._clock())
        self._board.drop(process.name)
        self._board.say(ready_text(self._label(process), body, seconds))
        device = self._plan.devices[self._workers.index(process)]
        if device.visible is not None and (body.get("device") or {}).get("type") == "cpu":
            self._board.say(f"warning: {process.name} runs on the CPU, not on {device.label}: python -m worker.doctor")
        self._announce()

    def _label(self, process: ManagedProcess) -> str:
        return f"{process.name} ({self._plan.devices[self._workers.index(process)].label})"

    def _give_up(self, process: ManagedProcess, told: str) -> None:
        process.is_given_up = True
        text = f"{process.name} {told}; given up (log: {process.child.log})"
        self._board.say(text)
        if process is self._gateway or all(worker.is_given_up for worker in self._workers):
            self._fail(text)
        self._announce()

    def _announce(self) -> None:
        """Once, when people can talk and no start is left to wait for: where."""
        ready = [worker for worker in self._workers if worker.is_ready]
        is_settled = all(worker.is_settled for worker in self._workers)
        if self._is_announced or not self._gateway.is_open or not ready or not is_settled:
            return
        self._is_announced = True
        totals = totals_text(len(ready), len(self._workers), sum(n_slots(worker.body) for worker in ready))
        for line in announcement(self._plan, totals, own_addresses(self._plan.host)):
            self._board.say(line)

    # --- the end -------------------------------------------------------------------------------

    async def _stop_all(self) -> None:
        """The gateway first, so that nobody is sent to a worker that goes; a worker's last session ends with it."""
        await self._end([self._gateway], self._plan.drain_s + self._policy.grace_s, is_told=True)
        await self._end(self._workers, self._plan.drain_s + self._policy.grace_s, is_told=True)
        self._board.say("stopped")

    async def _end(self, processes: Sequence[ManagedProcess], patience_s: float, *, is_told: bool = False) -> None:
        """Ask them to stop and wait; kill what is left after `patience_s`, or at once if somebody is in a hurry.

        is_told: a line says what is waited for.
        """
        for process in processes:
            if patience_s > 0:
                process.child.ask_to_stop()
        begin = self._clock()
        while running := [process for process in processes if process.child.is_running]:
            seconds = self._clock() - begin
            if seconds >= patience_s or self._hurry.is_set():
                break
            if is_told:
                names = ", ".join(process.name for process in running)
                most = f"sessions have up to {self._plan.drain_s:g} s, Ctrl-C again ends all"
                self._board.show("stopping", LiveLine(names, f"waiting {seconds:.0f} s for {names}: {most}"))
            await asyncio.sleep(POLL_S)
        self._board.drop("stopping")
        for process in running:
            if is_told:
                why = "at once" if self._hurry.is_set() else f"it did not end within {patience_s:g} s"
                self._board.say(f"{process.name} killed: {why}")
            process.child.kill()
        while any(process.child.is_running for process in processes):
            await asyncio.sleep(POLL_S)

    def _kill_all(self) -> None:
        """Nothing is left behind, whatever happened."""
        for process in self._all:
            process.child.kill()
        while any(process.child.is_running for process in self._all):
            time.sleep(POLL_S)


def announcement(plan: LaunchPlan, totals: str, addresses: Sequence[str]) -> list[str]:
    """The lines that say where to go. addresses: of this machine, as others know it."""
    lines = [f"ready: {plan.url()}  ({totals}; Ctrl-C stops)"]
    if not plan.is_remote:
        return lines
    lines += [f"       {plan.url(address)}" for address in addresses]
    lines.append("warning: whoever reaches this port can talk to the model; there is no password")
    if plan.scheme == "http":
        remedy = "start with --https (docs/operations.md)"
        lines.append(f"warning: browsers give camera and microphone only to https and to localhost; {remedy}")
    return lines
