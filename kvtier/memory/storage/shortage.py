"""The errors for budgets that are too small: each says which budget would do."""

from __future__ import annotations

from kvtier.config import format_size
from kvtier.errors import BudgetError
from kvtier.memory.storage.slabs import Budget, SlabAllocator


def too_small(slabs: SlabAllocator, needed: int, what: str, others: int | None = None) -> BudgetError:
    """Refused before anything changes.

    Args:
        slabs, needed: as `TieredMemory.admit` answers.
        what: subject and verb of what needs so much.
        others: caches, stores and engines that claim room of the memory besides; None: a cache made it for itself.
    """
    budget = slabs.budget
    by = "resize" if others is None else "memory.resize"
    remedy = f"Give {budget.tier}_budget={needed} or more, as an option or by `{by}`."
    if others:
        who = "another one" if others == 1 else f"{others} others"
        what = f"Besides what {who} may use of this memory, {_low(what)}"
        remedy += " Or close what shares it."
    return _error(
        f"{budget.tier}_budget is {budget.limit} bytes ({format_size(budget.limit)}). {what} at least {needed} bytes "
        f"({format_size(needed)}). "
        f"Nothing was changed. {remedy}",
        budget,
        needed,
    )


def no_device_memory(budget: Budget, missing: int, device: str) -> BudgetError:
    """The machine does not have what the budget allows, and nothing that is there can move."""
    return _error(
        f"{device} has no memory for more than the {budget.limit} bytes that the cache holds there, and nothing of it "
        f"can move; {missing} more are needed. Leave the device more room, or drop tokens with `crop`.",
        budget,
        budget.used + missing,
    )


def full(budget: Budget, missing: int, policy: str, withheld: int) -> BudgetError:
    """Nothing in a tier can move; or `withheld` blocks could, and the policy did not name them."""
    needed = budget.used + missing
    if withheld:
        why = f"{policy}.victims names too few blocks to evict, {withheld} more could leave"
        remedy = "Let it name as many as it is asked for, or give"
    else:
        why, remedy = "nothing in it can move", "Drop tokens with `crop`, or give"
    return _error(
        f"The {budget.tier} budget of {budget.limit} bytes is full and {missing} more are needed: {why}. {remedy} "
        f"{budget.tier}_budget={needed} or more.",
        budget,
        needed,
    )


def not_vacated(budget: Budget, limit: int) -> BudgetError:
    """A limit that holds what the caches claim, and what is there does not come to fit into it.

    Args:
        limit: that was asked for.
    """
    needed = budget.used
    return BudgetError(
        f"{budget.tier}_budget={limit} is enough for what they hold, but {needed} bytes are in use now and cannot "
        "be given back: other threads read them, or they are scattered. The budgets are as they were, and no token is "
        f"lost. Try again later, or give {budget.tier}_budget={needed} or more.",
        tier=budget.tier,
        needed=needed,
        budget=limit,
    )


def both_full(host: Budget, missing: int) -> BudgetError:
    """A block has to leave a device, and the host has no slot for it."""
    needed = host.used + missing
    return _error(
        f"The host budget of {host.limit} bytes is full and the device budget too. The next block needs {needed} bytes "
        "of host_budget. Give more of either, or drop tokens with `crop`.",
        host,
        needed,
    )


def _low(text: str) -> str:
    return text[:1].lower() + text[1:]


def _error(message: str, budget: Budget, needed: int) -> BudgetError:
    return BudgetError(message, tier=budget.tier, needed=needed, budget=budget.limit)
