"""`Batch`: the prompts of one call, which are added to an engine as its queue has room."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtier.errors import BudgetError, ConfigError, QueueFullError
from kvtier.serving.request import Prepared, Request, RequestOutput
from kvtier.serving.requests import Requests
from kvtier.serving.steps.loop import Loop


class Batch:
    """Prompts of which each is added once there is room for it.

    Args:
        requests, loop: of the engine.
        prepare: gives what the prompt of a number asks for; called once for each, in their order.
        add: adds what was prepared.

    Attributes:
        added: the requests of prompts that were added.
    """

    def __init__(
        self,
        requests: Requests,
        loop: Loop,
        prepare: Callable[[int], Prepared],
        add: Callable[[Prepared], list[Request]],
    ) -> None:
        self._requests = requests
        self._loop = loop
        self._prepare = prepare
        self._add = add
        self.added: list[Request] = []

    def run(self, prompts: Sequence[list[int]], request_id: str | None = None) -> dict[str, RequestOutput]:
        """Add the prompts, and wait until all have ended. Whatever is raised meanwhile cancels them.

        Args:
            prompts: token ids of each.
            request_id: of the request, where there is one prompt.

        Returns:
            The outputs by name, in the order of the prompts.
        """
        found: dict[str, RequestOutput] = {}
        number, asked = 0, None
        try:
            while number < len(prompts) or not all(each.done.is_set() for each in self.added):
                while number < len(prompts):
                    try:
                        # Once, also where the queue is full for some time: it takes a seed of torch's.
                        asked = asked or self._prepare(number)
                        made = self._add(asked)
                    except QueueFullError:
                        break
                    except (BudgetError, ConfigError) as error:
                        name = f"refused-{number}" if request_id is None else request_id
                        found[name] = RequestOutput(name, prompts[number], finish_reason="error", error=error)
                    else:
                        self.added += made
                        found |= {each.name: each.output for each in made}
                    number, asked = number + 1, None
                self._go_on(0 if asked is None else len(asked.samplings))
        except BaseException:  # nobody is given the outputs
            with self._requests.lock:
                for each in self.added:
                    each.cancelled = True
            raise
        return found

    def _go_on(self, count: int) -> None:
        """Return when a request has ended, or the queue has room for so many sequences of a prompt; 0: for none."""
        waited = next((each.done for each in self.added if not each.done.is_set()), None)
        if waited is not None or count:
            self._loop.run_until(
                lambda: (waited is not None and waited.is_set()) or (count > 0 and self._requests.has_room(count))
            )
