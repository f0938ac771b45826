"""Tasks that run beside the calls of a server."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class BackgroundTasks:
    """Tasks beside the calls; an error in one is raised where they are waited for."""

    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def send(self, task: Coroutine[Any, Any, None]) -> None:
        """Begin a task."""
        self.tasks.add(asyncio.get_running_loop().create_task(task))

    async def first_error(self) -> None:
        """Wait, for ever, but for an error."""
        while True:
            done, _ = await asyncio.wait(self.tasks, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                self.tasks.discard(task)
                task.result()
