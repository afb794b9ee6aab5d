"""On resume: what of a conversation's prefix is kept, loaded, recomputed, or attended to on the host.

The model. A forward of `layers` layers computes the new tokens; what of the prefix is not on the device either comes
over the link, layer by layer, while the device computes (Pensieve, section 4.3), or is computed again, which needs
only what is before it. So a head may be recomputed while the tail is loaded (published as Cake: from both ends). What
was dropped has to be recomputed; where it ends the prefix, that is a part of the new tokens' prefill (Pensieve,
section 4.3).

Prefill costs more the later its tokens are, loading a token costs the same everywhere: of what is in one tier, it is
always a head that is recomputed and a tail that is loaded. With `F(s)`, the device's work, and `G(s)`, the end of the
loads and what follows them, for a head of `s` tokens, the time to the first token is

    T(s) = max(F(s), G(s))      F never falls and G never rises with s

so that the best `s` is where they cross: found by bisection, each look at the runs once. What is on disk has a price
and so a split point of its own, around that. The choice between swapping and recomputing whole sequences by what both
cost is AdaptiveLLM's (section 3.4).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from kvtier.planning.resuming.prefix import (
    Busy,
    Choice,
    PrefixRun,
    Prices,
    Resume,
    ResumePlan,
    Setting,
    Verb,
    fixed_part,
)

#: What the best prices are wrong by: nothing takes as long twice.
CERTAIN = 0.01
#: A decision is left for another that promises so much less.
HYSTERESIS = 0.02


@dataclass(slots=True)
class _Outcome:
    """What a setting gives.

    Attributes:
        seconds: until the new tokens are computed.
        compute: the device's work alone, behind what others have queued there.
        link, disk: seconds of work.
        bound_by_host: whether the last forward waits for the host's attention.
    """

    seconds: float
    compute: float
    link: float
    disk: float
    bound_by_host: bool


def decide(what: Resume, prices: Prices, busy: Busy | None = None, *, before: ResumePlan | None = None) -> ResumePlan:
    """Choose for each run of a prefix what is done with it, so that the new tokens are computed soonest.

    The work grows with the runs, and with the logarithm of the blocks.

    Args:
        what: the conversation.
        prices: of the machine. The decision is such that an error of prices cannot make it worse than the better of
            loading all and recomputing all, as long as there is such a decision.
        busy: what others have asked for; None: nothing.
        before: what was decided about the same prefix, which is kept unless another decision promises more, or one way
            for all is better.

    Raises:
        ValueError: no new tokens, or sizes below 0.
    """
    return _Search(what, prices, busy or Busy()).decide(before)


def always(what: Resume, prices: Prices, busy: Busy | None, verb: Literal["load", "recompute", "attend"]) -> ResumePlan:
    """All that may be is loaded, or recomputed, or attended to on the host: to compare with."""
    search = _Search(what, prices, busy or Busy())
    return search.plan(search.simple().get(verb, (0, 0, 0)), "simple")


def arrivals(loads: Sequence[tuple[float, float]], layers: int, link: float, disk: float) -> tuple[float, float, float]:
    """When loads have come in the first layer and in the last one, and when the disk has read what is on it: layer by
    layer, in their order in each of them, over a disk and a link that do one after the other.

    Args:
        loads: for each, seconds of one layer's part on the disk, 0 for what is not there, and then on the link.
        layers: of the model.
        link, disk: when they have done what is before.
    """
    reads, each = (sum([x[i] for x in loads]) for i in (0, 1))
    first, got, behind = link + each, disk, each
    last = first + (layers - 1) * each
    for on_disk, on_link in loads:
        got += on_disk
        if on_disk:  # the link waits for it in the first layer, or in all of them
            first = max(first, got + behind)
            last = max(last, got + behind + (layers - 1) * max(each, reads))
        behind -= on_link
    return first, last, disk + layers * reads


class _Search:
    def __init__(self, what: Resume, prices: Prices, busy: Busy) -> None:
        if what.new < 1 or what.batch < 1 or what.layers < 1 or what.block < 1:
            raise ValueError("A resume computes at least one new token, of one row, in one layer.")
        if any(run.tokens < 0 or run.nbytes < 0 for run in what.runs):
            raise ValueError("A run of a prefix has no less than 0 tokens and bytes.")
        self.what, self.prices, self.busy = what, prices, busy
        self.runs = [run for run in what.runs if run.tokens]
        self.fixed = fixed_part(prices.prefill)
        self.chunk = max(prices.chunk // what.batch, 1) if prices.chunk else 0
        self.most = {x: sum([self.blocks(run) for run in self.runs if run.where == x]) for x in ("host", "disk")}
        # Behind what is recomputed in any case, nothing but the new tokens' prefill reads the host's blocks.
        last = max((i for i, run in enumerate(self.runs) if run.where == "dropped"), default=-1)
        behind = self.runs[last + 1 :]
        queries = what.new if last + 1 < len(self.runs) or last < 0 else what.new + self.runs[last].tokens
        self.attendable = 0
        if queries <= what.host_queries:
            self.attendable = sum([self.blocks(run) for run in behind if run.where == "host"])
        self.seen: dict[Setting, _Outcome] = {}

    def blocks(self, run: PrefixRun) -> int:
        """Of a run, the last of which may not be full."""
        return -(-run.tokens // self.what.block)

    # What a setting takes

    def seconds(self, tokens: int, past: int) -> float:
        """Of the device, for a prefill of all rows."""
        prices, batch = self.prices, self.what.batch
        forwards = self.forwards(tokens)
        return (forwards * self.fixed + batch * (prices.prefill(tokens, past) - self.fixed)) / self.busy.device_share

    def forwards(self, tokens: int) -> int:
        """Of a prefill in chunks."""
        return -(-tokens // self.chunk) if self.chunk else 1

    def split(self, setting: Setting) -> list[tuple[Verb, PrefixRun, int]]:
        """Verb, run and its tokens, in token order; a run in two or three parts where it is split."""
        heads, tail, size = {"host": setting[0], "disk": setting[1]}, setting[2], self.what.block
        loaded = self.most["host"] - setting[2]  # blocks of the host before those that are attended to there
        found: list[tuple[Verb, PrefixRun, int]] = []
        for run in self.runs:
            if run.where in ("device", "dropped"):
                found.append(("keep" if run.where == "device" else "recompute", run, run.tokens))
                continue
            blocks, left = self.blocks(run), run.tokens
            head = min(heads[run.where], blocks)
            heads[run.where] -= head
            cuts: list[tuple[Verb, int]] = [("recompute", head)]
            if run.where == "host":
                middle = min(max(loaded - head, 0), blocks - head) if tail else blocks - head
                loaded -= head + middle
                cuts += [("load", middle), ("attend", blocks - head - middle)]
            else:
                cuts.append(("load", blocks - head))
            for verb, count in cuts:
                tokens = min(count * size, left)
                left -= tokens
                if tokens:
                    found.append((verb, run, tokens))
        return found

    def outcome(self, setting: Setting) -> _Outcome:
        """Play the device, the link and the disk: forwards one after the other, each behind the loads that it reads."""
        found = self.seen.get(setting)
        if found is None:
            found = self.seen[setting] = self._play(self.split(setting))
        return found

    def _play(self, parts: Sequence[tuple[Verb, PrefixRun, int]]) -> _Outcome:
        what, prices, busy = self.what, self.prices, self.busy
        layers = what.layers
        clock, link, disk = busy.device, busy.link, busy.disk
        compute = busy.device
        up, read = prices.up * busy.link_share, prices.disk * busy.disk_share
        position = again = 0
        hosted, bound_by_host = 0.0, False
        link_work = disk_work = 0.0
        loads = list[tuple[float, float]]()  # seconds of the disk and of the link, of a layer, for the next forward
        verbs = [verb for verb, _, _ in parts]
        # Whether something is recomputed before the last load.
        both = "load" in verbs and "recompute" in verbs[: len(verbs) - verbs[::-1].index("load")]
        slower = prices.loading if both else 1.0

        def forward(tokens: int, past: int, last: bool) -> None:
            """The next forward: layer by layer, each layer when what it reads has come."""
            nonlocal clock, compute, link, disk, bound_by_host
            factor = prices.computing if both and not last else 1.0
            seconds = self.seconds(tokens, past) * factor
            first = self.seconds(min(tokens, self.chunk or tokens), past) * factor
            if last and hosted:  # which each chunk reads
                own = layers * (prices.host_overhead + hosted / prices.host)
                size = self.chunk or tokens
                each = [self.seconds(min(size, tokens - i), past + i) for i in range(0, tokens, size)]
                bound_by_host = own > min(each)
                first, *rest = (max(x, own) for x in each)
                seconds = first + sum(rest)
            start = clock
            if loads:
                came, link, disk = arrivals(loads, layers, link, disk)
                start = max(start, came, link + first / layers - first)
                loads.clear()
            clock = start + seconds
            compute += seconds

        for verb, run, tokens in parts:
            if verb == "recompute":
                again += tokens
                position += tokens
                continue
            if again:
                if hosted:
                    return _Outcome(math.inf, math.inf, 0.0, 0.0, True)  # more queries than host threads attend for
                forward(again, position - again, last=False)
                again = 0
            position += tokens
            nbytes = run.nbytes * tokens / run.tokens
            if verb == "attend":
                hosted += nbytes
            elif verb == "load":
                on_link = slower * (prices.copy_overhead + nbytes / up)
                on_disk = slower * nbytes / read if run.where == "disk" else 0.0
                loads.append((on_disk, on_link))
                link_work, disk_work = link_work + layers * on_link, disk_work + layers * on_disk
        if hosted and again + what.new > what.host_queries:
            return _Outcome(math.inf, math.inf, 0.0, 0.0, True)
        forward(again + what.new, position - again, last=True)
        return _Outcome(clock, compute, link_work, disk_work, bound_by_host)

    # Searching

    def simple(self) -> dict[str, Setting]:
        """One way for all that may go that way."""
        found: dict[str, Setting] = {"load": (0, 0, 0), "recompute": (self.most["host"], self.most["disk"], 0)}
        if self.attendable:
            found["attend"] = (0, 0, self.attendable)
        return found

    def cross(self, disk: int, attended: int) -> Setting:
        """The best head of the host's runs for these others: where the device's work becomes the longer part."""
        low, high = 0, self.most["host"] - attended
        most = high
        while low < high:
            middle = (low + high) // 2
            if self.bound_by_device((middle, disk, attended)):
                high = middle
            else:
                low = middle + 1
        # The ends are apart by what a forward of its own takes.
        return min([(host, disk, attended) for host in {max(low - 1, 0), low, 0, most}], key=self.rank)

    def bound_by_device(self, setting: Setting) -> bool:
        """Whether nothing but the device's own work is waited for."""
        found = self.outcome(setting)
        return found.seconds <= found.compute * (1 + 1e-12)

    def best(self) -> Setting:
        """The setting that takes least."""
        most, attendable = self.most, self.attendable
        found = [
            (host, disk, attended)
            for attended in {0, attendable}
            for disk in {0, most["disk"]}
            for host in {0, most["host"] - attended}
        ]
        found.append(self.lowest(lambda disk: self.cross(disk, 0), most["disk"]))
        if attendable:
            # What the host attends to makes another number of the disk's blocks the best one.
            found.append(self.lowest(self.over_attended, most["disk"]))
        best = min(found, key=self.rank)
        while True:
            # A forward more or less, where runs meet or a chunk is full, is a step in what is otherwise smooth.
            better = min(filter(self.is_possible, self.near(best)), key=self.rank)
            if self.outcome(better).seconds >= self.outcome(best).seconds * (1 - 1e-9):
                return best
            best = better

    def over_attended(self, disk: int) -> Setting:
        """The best setting in which so many of the disk's blocks are recomputed, and the host attends to what is behind
        these. Where all are, they may be behind what it attends to, within the new tokens' prefill."""
        behind, left = self.most["host"], disk
        for run in self.runs:
            if left <= 0:
                break
            left -= self.blocks(run) if run.where == "disk" else 0
            behind -= self.blocks(run) if run.where == "host" else 0
        ends = {min(self.attendable, behind)} | ({self.attendable} if disk == self.most["disk"] else set())
        return min([self.lowest(partial(self.cross, disk), end) for end in ends], key=self.rank)

    def near(self, setting: Setting) -> list[Setting]:
        """It, and others that are some blocks or the next end of a run away."""
        host, disk, attended = setting
        ends: list[int] = []
        for where, now in (("host", host), ("disk", disk)):
            total, below, above = 0, 0, self.most[where]
            for run in self.runs:
                if run.where == where:
                    total += self.blocks(run)
                    below = total if total < now else below
                    above = min(above, total) if total > now else above
            ends += (below, above)
        found = [setting, *((x, disk, attended) for x in ends[:2]), *((host, x, attended) for x in ends[2:])]
        for i in (-2, -1, 1, 2):
            found += [(host + i, disk, attended), (host, disk + i, attended), (host, disk, attended + i)]
            found += [(host + i, disk - i, attended), (host + i, disk, attended - i)]
        return found

    def rank(self, setting: Setting) -> tuple[float, Setting]:
        """Of what takes as long the least work of the device: others wait for it."""
        return self.outcome(setting).seconds, setting

    def lowest(self, setting_of: Callable[[int], Setting], most: int) -> Setting:
        """The best of the settings 0 to `most`, whose seconds first fall and then rise."""
        low, high = 0, most

        def at(i: int) -> float:
            return self.outcome(setting_of(i)).seconds

        while high - low > 2:
            middle = (low + high) // 2
            if at(middle) <= at(middle + 1):
                high = middle
            else:
                low = middle + 1
        # Its ends are apart by what a forward of its own takes.
        return min(map(setting_of, {*range(low, high + 1), 0, most}), key=self.rank)

    def decide(self, before: ResumePlan | None) -> ResumePlan:
        """See `decide`."""
        best, simple = self.best(), self.simple()
        chosen, reason = self.safe(best, simple)
        if before is not None and self.is_possible(before.settings):
            had, least = self.outcome(before.settings).seconds, min(self.outcome(x).seconds for x in simple.values())
            more = 1 + max(HYSTERESIS, self.prices.error)
            if had <= min(self.outcome(chosen).seconds * more, least * (1 + HYSTERESIS)):
                chosen, reason = before.settings, "before"
        if not (self.most["host"] or self.most["disk"]):
            reason = "only"
        found = self.plan(chosen, reason)
        found.alternatives["split"] = self.outcome(best).seconds
        return found

    def is_possible(self, setting: Setting) -> bool:
        """Whether a setting is one of this prefix."""
        host, disk, attended = setting
        return (
            min(setting) >= 0
            and host + attended <= self.most["host"]
            and disk <= self.most["disk"]
            and attended <= self.attendable
            and self.outcome(setting).seconds < math.inf
        )

    def safe(self, best: Setting, simple: dict[str, Setting]) -> tuple[Setting, str]:
        """A setting that is no worse than loading all and recomputing all, whatever prices are wrong by; where none is
        sure to gain anything, the best of the simple ways: attending to all, where that promises enough more."""
        took = {name: self.outcome(setting).seconds for name, setting in simple.items()}
        name = min(("load", "recompute"), key=took.__getitem__)
        if took.get("attend", math.inf) * (1 + HYSTERESIS) < took[name]:
            name = "attend"
        if best == simple[name]:
            return best, "simple"
        error = max(self.prices.error, CERTAIN)
        least = took[name]
        limit = least * (1 - error) / (1 + error)
        if self.outcome(best).seconds <= limit:
            return best, "simple" if best in simple.values() else "split"
        host, disk, attended = best
        if name == "load" and not (disk or attended):
            # The longest head that is recomputed before all could have been loaded.
            low, high = 0, host
            while low < high:
                middle = (low + high + 1) // 2
                low, high = (middle, high) if self.outcome((middle, 0, 0)).compute <= limit else (low, middle - 1)
            # The tail loads more slowly meanwhile, perhaps by more than it is shorter.
            if low and self.outcome((low, 0, 0)).seconds <= least:
                return (low, 0, 0), "margin"
        return simple[name], "margin"

    # The answer

    def plan(self, setting: Setting, reason: str) -> ResumePlan:
        """A setting as a plan, with what the others would take."""
        what, prices, busy = self.what, self.prices, self.busy
        parts, found = self.split(setting), self.outcome(setting)
        choices: list[Choice] = []
        start = recomputed = attended = 0
        for verb, run, tokens in parts:
            nbytes = run.nbytes * tokens // run.tokens
            seconds = {} if run.where == "device" else {"recompute": self.seconds(tokens, start)}
            if run.where in ("host", "disk"):
                load = nbytes / (prices.up * busy.link_share)
                if run.where == "disk":
                    load = max(load, nbytes / (prices.disk * busy.disk_share))
                seconds["load"] = what.layers * (prices.copy_overhead + load)
                recomputed += tokens if verb == "recompute" else 0
                attended += tokens if verb == "attend" else 0
            if run.where == "host" and self.attendable:
                seconds["attend"] = what.layers * (prices.host_overhead + nbytes / prices.host)
            choices.append(Choice(verb, run.where, start, start + tokens, nbytes, seconds))
            start += tokens
        binding = "host" if found.bound_by_host else "device"
        if not self.bound_by_device(setting):
            binding = "disk" if busy.disk + found.disk > busy.link + found.link else "link"
        return ResumePlan(
            choices,
            found.seconds,
            {name: self.outcome(x).seconds for name, x in self.simple().items()},
            found.compute - busy.device,
            found.link,
            found.disk,
            binding,
            reason,
            recomputed,
            attended,
            setting,
        )
