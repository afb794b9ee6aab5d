"""Served tokens per tenant: who is next where several wait.

Virtual token counters (Sheng et al., Fairness in Serving Large Language Models, OSDI 2024): the tenant that was served
least goes next. Of two tenants that both have something waiting all the time, neither gets ahead of the other by more
than what one of its requests, and the tokens of those that run at a time, weigh.
"""

from __future__ import annotations

from collections.abc import Iterable

#: A generated token weighs as many of a prompt: a step gives one of each sequence, and many of a prompt.
GENERATED = 2.0
#: Tenants that are counted, beyond which those are left out that would begin at the same count.
MOST = 4096


class Shares:
    """Counts what tenants were served.

    Args:
        weights: of tenants; one with weight 2 gets twice as much. 1 for all others.
        generated: weight of a generated token against one of a prompt that is computed.
    """

    def __init__(self, weights: dict[str, float] | None = None, *, generated: float = GENERATED) -> None:
        self.weights = dict(weights or {})
        self.generated = generated
        #: Served so far, divided by the tenant's weight.
        self.served: dict[str, float] = {}
        self._last = ""

    def arrives(self, tenant: str, active: Iterable[str]) -> None:
        """A tenant that had nothing waiting and nothing running has a request.

        It gets no credit for the time in which it had none: it begins with the least of those that are active. If none
        is, it begins where the last one was that was served: what that one took while it was alone is no debt.
        """
        active = set(active)
        least = min((self.served.get(each, 0.0) for each in active if each != tenant), default=None)
        if least is None:
            least = self.served.get(self._last, 0.0)
        if len(self.served) > MOST:  # whoever was served less than that begins there when it comes back
            known = {*active, self._last}
            self.served = {each: x for each, x in self.served.items() if each in known or x > least}
        self.served[tenant] = max(self.served.get(tenant, 0.0), least)

    def serve(self, tenant: str, computed: int, generated: int) -> None:
        """A step computed so many tokens of a prompt, and gave so many new ones."""
        self._last, weight = tenant, self.weights.get(tenant, 1.0)
        self.served[tenant] = self.served.get(tenant, 0.0) + (computed + self.generated * generated) / weight
