"""The exceptions of kvtier, one tree.

KVTierError
├── ConfigError            (ValueError)    an option that cannot be honoured
├── UnknownOptionError     (TypeError)     an option that does not exist
├── MismatchError          (ValueError)    keys and values that do not belong to what the cache holds
├── BudgetError            (MemoryError)   a budget too small for what is asked; `.needed` names the smallest
├── InterruptedStepError   (RuntimeError)  the last forward did not finish
├── StaleViewError         (RuntimeError)  a view of KV that the cache no longer holds
├── ConcurrentUseError     (RuntimeError)  two threads on one cache
├── ClosedError            (RuntimeError)  the cache, or its memory, was closed
├── MemoryInUseError       (RuntimeError)  a memory is closed while caches use it
├── StoreInUseError        (RuntimeError)  a folder of saved sequences is open in another store
├── QueueFullError         (RuntimeError)  more requests wait than an engine lets wait
├── TransferError          (RuntimeError)  a copy between tiers failed; its source is intact
├── CorruptionError        (RuntimeError)  a block in host memory does not hold what was written
└── UnsupportedError       (RuntimeError)  something a tiered cache cannot do
"""


class KVTierError(Exception):
    """Base of every error that kvtier raises on purpose."""


class ConfigError(KVTierError, ValueError):
    """An option that is malformed or cannot be honoured on this machine."""


class UnknownOptionError(KVTierError, TypeError):
    """A keyword that a class or function of kvtier does not have; the message names the nearest one."""


class MismatchError(KVTierError, ValueError):
    """Keys and values whose shape, dtype, device or layer do not fit what the cache already holds."""


class BudgetError(KVTierError, MemoryError):
    """A budget is too small.

    Attributes:
        tier: `"device"` or `"host"`, the budget that is short.
        needed: the smallest budget in bytes with which the refused step works.
        budget: the budget in bytes as it is.
        pinned: conversations that are pinned, where a `ConversationStore` refuses a call: what they keep is part of
            what is needed.
    """

    def __init__(self, message: str, *, tier: str, needed: int, budget: int, pinned: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.tier = tier
        self.needed = needed
        self.budget = budget
        self.pinned = pinned

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_budget_error, (str(self), self.tier, self.needed, self.budget, self.pinned)


def _rebuild_budget_error(
    message: str, tier: str, needed: int, budget: int, pinned: tuple[str, ...] = ()
) -> BudgetError:
    return BudgetError(message, tier=tier, needed=needed, budget=budget, pinned=pinned)


class InterruptedStepError(KVTierError, RuntimeError):
    """The last forward ended before every layer was updated: `crop(0)` drops it, `reset()` empties the cache."""


class StaleViewError(KVTierError, RuntimeError):
    """A view is read after the cache dropped or reordered the tokens it showed."""


class ConcurrentUseError(KVTierError, RuntimeError):
    """A second thread uses a cache while a forward of another thread is under way."""


class ClosedError(KVTierError, RuntimeError):
    """The cache is used after `close()`."""


class MemoryInUseError(KVTierError, RuntimeError):
    """A `TieredMemory` is closed while caches use it."""


class StoreInUseError(KVTierError, RuntimeError):
    """A folder of saved sequences is open in another store or process; or an `Engine` uses a store that is closed."""


class QueueFullError(KVTierError, RuntimeError):
    """An `Engine` is given a request while as many wait as may."""


class TransferError(KVTierError, RuntimeError):
    """A copy between two tiers failed. The source still holds the data."""


class CorruptionError(KVTierError, RuntimeError):
    """A block in host memory does not hold the bytes that were written: `reset()`, and compute its tokens again."""


class UnsupportedError(KVTierError, RuntimeError):
    """A use that a tiered cache cannot serve exactly; the message names the way out."""
