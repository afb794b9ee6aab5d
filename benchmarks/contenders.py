"""The caches that are compared, each made for one case and filled alike.

At the top level this module imports public names of kvtier only, for child processes use it with other commits' kvtier.

dynamic       DynamicCache, what `generate` uses by default; every ratio is against it
static        StaticCache, of exactly the length that is needed, not compiled
fp8           QuantizedCache with that backend; lossy, as are the next two
quanto, hqq   QuantizedCache with 4 bits, if the package of that name is installed
offloaded     DynamicCache(offloading=True); CUDA only
dense         TieredKVCache without attention on the host: each layer's KV is laid out as one tensor
kvtier        TieredKVCache as it comes: on CUDA all that fits on the device, on a CPU all in the host tier
enabled       the same under the model's attention implementation "kvtier": `kvtier.enable(model)`
kvtier@25%    TieredKVCache with a device budget of 25% of the KV; at 100% everything is resident. What is not,
              host threads attend to in place. On a CPU the device is emulated in RAM.
fetch@25%     the same, but what is not on the device is fetched, and laid out as one tensor of a layer
adaptive@25%  the same as kvtier@25%, with a policy by its name; so with all others that kvtier has
kvtier:full   the same as kvtier, and audit="full"; so with all tiered caches but dense, and with :off and :sampled
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal

import torch
from transformers import Cache, DynamicCache, PretrainedConfig, PreTrainedModel, QuantizedCache, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

from benchmarks.models import Geometry
from kvtier import TieredKVCache, enable

BASELINE = "dynamic"
_SHARE = re.compile(r"([a-z-]+)@(\d+(?:\.\d+)?)%")
_AUDITED = re.compile(r"(.+):(off|sampled|full)")
#: What a tiered cache says about itself: the fact's name, and where it is in `cache.stats`.
STATS = {
    "device_budget": "device.budget",
    "device_peak_bytes": "device.peak_bytes",
    "host_peak_bytes": "host.peak_bytes",
    "page_locked_bytes": "host.page_locked_bytes",
    "bytes_up": "bytes_up",
    "bytes_down": "bytes_down",
    "copies_up": "copies_up",
    "copies_down": "copies_down",
    "dense_fallbacks": "dense_fallbacks",
    "stall_seconds": "stall_seconds",
}


class Unavailable(Exception):
    """A contender that cannot be built on this machine; the message says why."""


def policies() -> Collection[str]:
    """The names of kvtier's policies."""
    from kvtier.planning.policies.names import POLICIES

    return POLICIES.keys()


def default_block() -> int:
    """Tokens in a block of a device tier, unless the user says otherwise."""
    from kvtier.config import DEVICE_BLOCK

    return DEVICE_BLOCK


@dataclass(frozen=True)
class Case:
    """What every contender of one comparison has to hold.

    Attributes:
        config: of the model.
        geometry: of its keys and values.
        device: where the model runs.
        context: tokens before the measurement.
        new_tokens: the most that it adds.
        block_size: of the tiered caches, in tokens; 0: as they come.
        batch: sequences of that context.
        device_block: tokens in a block where `block_size` is 0 and there is a device tier.
    """

    config: PretrainedConfig
    geometry: Geometry
    device: torch.device
    context: int
    new_tokens: int
    block_size: int
    batch: int = 1
    device_block: int = field(default_factory=default_block)

    @property
    def block_tokens(self) -> int:
        """Tokens in a block where there is a device tier."""
        return self.block_size or self.device_block

    @property
    def blocks(self) -> int | Literal["auto"]:
        """The block size, as an option of the tiered cache."""
        return self.block_size or "auto"

    @property
    def kv_bytes(self) -> int:
        """Bytes of all keys and values at the end."""
        return self.batch * self.geometry.kv_bytes(self.context + self.new_tokens)

    @property
    def resident_bytes(self) -> int:
        """A device budget that surely holds everything: whole blocks, one layer's workspace, slabs not quite used."""
        size = self.block_tokens
        blocks = math.ceil((self.context + self.new_tokens) / size) + 1
        layer = self.batch * blocks * size * self.geometry.token_bytes
        return int((self.geometry.layers + 1) * layer * 1.05)


@dataclass(frozen=True)
class Contender:
    """One way to hold keys and values.

    Attributes:
        name: as above.
        make: builds the cache, empty.
        device_share, host_share: memory it takes, as shares of the KV, for deciding what fits at the same time.
        enables: whether its turns are under `kvtier.enable`.
    """

    name: str
    make: Callable[[Case], Cache]
    device_share: float
    host_share: float
    enables: bool = False

    @property
    def tiered(self) -> bool:
        """Whether it is a cache of kvtier."""
        name = re.split("[@:]", self.name)[0]
        return name in ("kvtier", "enabled", "fetch", "dense") or name in policies()

    def attention(self, model: PreTrainedModel) -> contextlib.AbstractContextManager[object]:
        """The attention implementation of its turns. Caches of others never see what kvtier sets."""
        if self.enables:
            return enable(model)
        return contextlib.nullcontext() if self.tiered else _as_without_kvtier()

    def build(self, case: Case) -> Cache:
        """An empty cache. Raises `Unavailable`."""
        try:
            return self.make(case)
        except Unavailable:
            raise
        except Exception as error:
            raise Unavailable(f"{type(error).__name__}: {first_line(error)}") from error


def contender(name: str) -> Contender:
    """The contender of that name. Raises `ValueError` for one that is not known."""
    audited = _AUDITED.fullmatch(name)
    plain, audit = (audited[1], audited[2]) if audited else (name, None)
    match = _SHARE.fullmatch(plain)
    if match and (match[1] in ("kvtier", "fetch") or match[1] in policies()):
        share = float(match[2]) / 100
        if not 0 < share <= 1:
            raise ValueError(f"contender {name!r}: a share is above 0% and at most 100%")
        host, policy = match[1] != "fetch", match[1] if match[1] not in ("kvtier", "fetch") else None
        return Contender(name, lambda case: _tiered(case, share, host, policy, audit), share + 0.1, 1.1)
    if plain == "kvtier" and audit is not None:
        return Contender(name, lambda case: TieredKVCache(case.config, block_size=case.blocks, audit=audit), 1.2, 0)
    if name not in _CONTENDERS:
        shares = "@25%, ".join(("kvtier", "fetch", *policies()))
        raise ValueError(f"unknown contender {name!r}; there are {', '.join(_CONTENDERS)}, {shares}@25%")
    return _CONTENDERS[name]


@contextlib.contextmanager
def _as_without_kvtier() -> Iterator[None]:
    """The entry "sdpa" is Transformers' own again, for a while."""
    entries = AttentionInterface._global_mapping
    before = entries["sdpa"]
    entries["sdpa"] = sdpa_attention_forward
    try:
        yield
    finally:
        entries["sdpa"] = before


def _tiered(case: Case, share: float, host: bool, policy: str | None, audit: str | None) -> Cache:
    budget = case.resident_bytes if share == 1 else max(int(case.kv_bytes * share), 1)
    # Older commits know no policies, and no audit.
    more = {name: value for name, value in (("policy", policy), ("audit", audit)) if value is not None}
    return TieredKVCache(case.config, device_budget=budget, block_size=case.blocks, host_attention=host, **more)


def _as_it_comes(case: Case) -> Cache:
    return TieredKVCache(case.config, block_size=case.blocks)


def _dense(case: Case) -> Cache:
    return TieredKVCache(case.config, block_size=case.blocks, host_attention=False)


def _static(case: Case) -> Cache:
    return StaticCache(config=case.config, max_cache_len=case.context + case.new_tokens)


def _quantized(backend: str, package: str | None = None) -> Callable[[Case], Cache]:
    def make(case: Case) -> Cache:
        if package is not None and importlib.util.find_spec(package.split("-")[0]) is None:
            raise Unavailable(f"needs the package {package}")
        return QuantizedCache(backend, case.config)

    return make


def _offloaded(case: Case) -> Cache:
    if case.device.type != "cuda":
        raise Unavailable("needs CUDA")
    return DynamicCache(config=case.config, offloading=True)


_CONTENDERS = {
    c.name: c
    for c in (
        Contender("dynamic", lambda case: DynamicCache(config=case.config), 1.2, 0),
        Contender("static", _static, 1.1, 0),
        Contender("fp8", _quantized("fp8"), 0.8, 0),
        Contender("quanto", _quantized("quanto", "optimum-quanto"), 0.8, 0),
        Contender("hqq", _quantized("hqq", "hqq"), 0.8, 0),
        Contender("offloaded", _offloaded, 0.3, 3.2),
        Contender("dense", _dense, 1.3, 0),
        Contender("kvtier", _as_it_comes, 1.2, 0),
        Contender("enabled", _as_it_comes, 1.2, 0, enables=True),
    )
}


def random_kv(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one layer, `[batch, kv_heads, context, head_dim]`, the same at every call."""
    g = case.geometry
    random = torch.Generator(case.device).manual_seed(0)
    shape = (2, case.batch, g.kv_heads, case.context, g.head_dim)
    both = torch.randn(shape, generator=random, dtype=g.dtype, device=case.device)
    return both[0], both[1]


def fill(cache: Cache, case: Case, kv: tuple[torch.Tensor, torch.Tensor] | None = None) -> None:
    """Give every layer of an empty cache the same random keys and values (or `kv`), in place of a prefill."""
    keys, values = random_kv(case) if kv is None else kv
    for layer in range(case.geometry.layers):
        cache.update(keys, values, layer)


def held_bytes(cache: Cache) -> int:
    """Bytes that a cache has allocated for keys and values, on all devices together."""
    if isinstance(cache, TieredKVCache):
        stats = cache.stats
        return stats.device.bytes + stats.host.bytes + stats.resident_bytes
    return sum(_tensor_bytes(value) for layer in cache.layers for value in vars(layer).values())


def _tensor_bytes(value: object) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, tuple | list):
        return sum(_tensor_bytes(x) for x in value)
    return 0


def host_share(cache: Cache, case: Case) -> float:
    """Of a cache with a device budget, the share of the blocks that have no place on the device."""
    assert isinstance(cache, TieredKVCache)
    tiered = [x for x in cache.residency().layers if x.kind == "tiered"]
    blocks = sum(-(-x.tokens // case.block_tokens) * case.batch for x in tiered)
    return (blocks - sum(x.device_blocks for x in tiered)) / max(blocks, 1)


def tier_facts(cache: Cache) -> dict[str, float]:
    """What a tiered cache says about itself; nothing of others.

    Another commit's statistics may have other names: what this commit's names do not find there is left out.
    """
    if not isinstance(cache, TieredKVCache):
        return {}
    stats = cache.stats
    found: dict[str, float] = {}
    for name, path in STATS.items():
        with contextlib.suppress(AttributeError):
            found[name] = attrgetter(path)(stats)
    with contextlib.suppress(AttributeError):
        tiered = [layer for layer in cache.residency().layers if layer.kind == "tiered"]
        found["device_blocks"] = sum(layer.device_blocks for layer in tiered)
        found["host_blocks"] = sum(layer.host_blocks for layer in tiered)
    return found


def first_line(error: BaseException) -> str:
    """The first line of an error's message, without paths of this machine."""
    text = (str(error).strip().splitlines() or [""])[0]
    return re.sub(r"(?<![\w.])/[\w.+-]+(?:/[\w.+-]+)+", "<path>", text)
