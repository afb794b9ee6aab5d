"""What resuming is decided from, and the decision: a prefix, prices, what is queued, and a plan. Data only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvtier.errors import ConfigError
from kvtier.planning.rates import Rates
from kvtier.planning.step import whole

#: Where a run of blocks is.
Where = Literal["device", "host", "disk", "dropped"]
#: What is done with it.
Verb = Literal["keep", "load", "recompute", "attend"]

#: What prices are wrong by, where nobody has measured them.
ESTIMATED = 0.25
#: Blocks of the host's runs and of the disk's that are recomputed, from the first on; and of the host's that host
#: threads attend to, from the last on.
Setting = tuple[int, int, int]
#: Seconds of a forward of so many tokens of one row on so many cached ones, such as `predictors.Prefill.seconds`: a
#: fixed part, and parts that grow with the tokens and with the pairs that attend to each other (AdaptiveLLM, 3.2).
PrefillSeconds = Callable[[int, int], float]


def fixed_part(prefill: PrefillSeconds) -> float:
    """Seconds of a prefill that do not depend on its tokens: what a second-degree polynomial takes at 0."""
    one, two, three = (prefill(n, 0) for n in (1, 2, 3))
    return min(max(3 * (one - two) + three, 0.0), one)


@dataclass(frozen=True, slots=True)
class PrefixRun:
    """Neighbouring blocks of a conversation's prefix that are in one place.

    Attributes:
        where: "device"; "host"; "disk": only there; "dropped": nowhere.
        tokens: per row.
        nbytes: of one layer, of all rows together.
    """

    where: Where
    tokens: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Resume:
    """A conversation that goes on.

    Attributes:
        runs: of its prefix, in token order.
        new: tokens per row to prefill behind it, at least 1.
        layers: of the model.
        batch: rows.
        block: tokens of a block; splits are between blocks.
        host_queries: new tokens per row up to which host threads can attend; 0: they cannot.
    """

    runs: Sequence[PrefixRun]
    new: int
    layers: int
    batch: int = 1
    block: int = 64
    host_queries: int = 16


@dataclass(frozen=True, slots=True)
class SavedPrefix:
    """The beginning of a conversation, of which more is on the disk than in memory.

    Attributes:
        files: the first token and the bytes of each, in order: each is read as a whole.
        length: tokens that are saved.
        past: the first of these, which are in memory.
        more: tokens that are computed behind all of these.
        step: a tail begins at multiples of this, so that it is whole blocks; None: all is loaded, or none.
        batch: rows that are computed, of these tokens each (beams): what is loaded is loaded once for all.
    """

    files: Sequence[tuple[int, int]]
    length: int
    past: int
    more: int
    step: int | None = None
    batch: int = 1

    def checked(self, answer: object) -> int:
        """From which token on a policy has said to load.

        Raises:
            ConfigError: it can be loaded from there neither as a whole nor as a tail.
        """
        start = whole(answer, "load_from")
        cut = self.step is not None and self.past <= start < self.length and start % self.step == 0
        if start in (0, self.length) or cut:
            return start
        tails = "" if self.step is None else f", or a multiple of {self.step} from {self.past} on below that"
        raise ConfigError(
            f"The policy's load_from is {start}: it has to be 0 (load all), {self.length} (compute all){tails}."
        )


@dataclass(frozen=True, slots=True)
class Prices:
    """What things take on this machine.

    Attributes:
        prefill: seconds of a forward of one row, from its tokens and the cached ones.
        up: bytes per second over the link to the device.
        disk: bytes per second from disk to the host.
        host: bytes of KV per second that host threads attend to.
        copy_overhead: seconds that one layer's load of one run takes besides.
        host_overhead: seconds that one layer's host attention takes besides.
        chunk: tokens of a forward at the most, over all rows (chunked prefill); 0: any number.
        computing, loading: what a head that is recomputed takes while the tail is loaded, and that load, as multiples
            of what they take alone: where both use the same cores or the same memory, both are slower.
        error: what predictions from these are wrong by, as a share.
    """

    prefill: PrefillSeconds
    up: float
    disk: float = 2e9
    host: float = 60e9
    copy_overhead: float = 10e-6
    host_overhead: float = 60e-6
    chunk: int = 0
    computing: float = 1.0
    loading: float = 1.0
    error: float = 0.0

    @classmethod
    def of(cls, rates: Rates, prefill: PrefillSeconds, *, disk: float = 2e9) -> Prices:
        """From the rates of a machine; where these are estimates, with the error of estimates."""
        return cls(
            prefill,
            rates.up,
            disk,
            rates.host,
            rates.copy_overhead,
            rates.host_overhead,
            error=0.05 if rates.measured else ESTIMATED,
        )


@dataclass(frozen=True, slots=True)
class Busy:
    """What others have asked of the machine.

    Attributes:
        link, disk, device: seconds until what is queued there is done.
        link_share, disk_share, device_share: of the rate, that is left meanwhile: 1 is all. A batch that decodes takes
            some of the device, its fetches some of the link.
    """

    link: float = 0.0
    disk: float = 0.0
    device: float = 0.0
    link_share: float = 1.0
    disk_share: float = 1.0
    device_share: float = 1.0


@dataclass(frozen=True, slots=True)
class Choice:
    """What is done with tokens of the prefix, and what each way would take for them alone.

    Attributes:
        verb: "keep", "load", "recompute" or "attend".
        where: they are.
        start, stop: tokens of the prefix.
        nbytes: of one layer.
        seconds: by verb, of the link (or disk), the device, or the host; without what cannot be done.
    """

    verb: Verb
    where: Where
    start: int
    stop: int
    nbytes: int
    seconds: dict[str, float]


@dataclass(slots=True)
class ResumePlan:
    """A decision, and why.

    Attributes:
        choices: for the prefix, in token order.
        seconds: predicted until the new tokens are computed.
        alternatives: the same if all that may be is "load"ed, "recompute"d, or "attend"ed to on the host, and "split",
            the best of all, before the margin for errors.
        device, link, disk: seconds of work, without what others have queued there.
        binding: what makes it as long as it is: "device", "link", "disk" or "host".
        reason: "only" (there is no choice), "split", "simple" (one way for all of it), "margin" (more would be gained
            if prices were right), or "before" (another decision does not promise enough more).
        recomputed, attended: tokens that are on the host or on disk and are recomputed, or attended to on the host.
    """

    choices: list[Choice]
    seconds: float
    alternatives: dict[str, float]
    device: float
    link: float
    disk: float
    binding: str
    reason: str
    recomputed: int
    attended: int
    settings: Setting = field(repr=False, default=(0, 0, 0))

    def explain(self) -> str:
        """One sentence."""
        others = ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in sorted(self.alternatives.items()))
        parts = ", ".join(f"{x.verb} [{x.start}, {x.stop}) ({x.where})" for x in self.choices) or "nothing to restore"
        return f"{parts}: {self.seconds * 1e3:.3g} ms, bound by the {self.binding} ({self.reason}; all of it: {others})"
