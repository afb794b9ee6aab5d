"""Machines by name with the numbers of their datasheets, models as sizes, and what follows by the roofline.

These are estimates, for planning without the machine; `kvtier.calibrate` measures. A step over few tokens takes as long
as reading the weights, one over many as long as its arithmetic, whichever is more (Williams et al., Roofline, 2009).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.errors import ConfigError
from kvtier.planning.hardware.predictors import Curve, HostAttention, Linear, Prefill

#: What programs reach of a datasheet's numbers: dense products, reads of device memory, copies over a link, attention
#: on the host. Stated estimates, of the size that published benchmarks of these machines report.
OF_FLOPS, OF_DEVICE_MEMORY, OF_LINK, OF_HOST_MEMORY = 0.6, 0.8, 0.85, 0.6
#: Seconds that launching a layer's kernels takes, a copy besides its bytes, and a call of host attention.
LAUNCHES, COPY, CALL, ROUND_TRIP = 20e-6, 10e-6, 20e-6, 40e-6
#: Share of the host's rate that a busy link takes where nothing was measured.
LOST = 0.2
#: Query tokens at which the time of a layer is tabulated.
_TOKENS = tuple(2**i for i in range(14))


@dataclass(frozen=True, slots=True)
class Machine:
    """One device, its link and its host, by the numbers of datasheets.

    Attributes:
        flops: dense bf16 operations per second, without sparsity.
        device_memory: bytes per second.
        device_bytes: of device memory.
        link: bytes per second in one direction.
        host_memory: bytes per second of the host.
        overlaps: whether copies and host attention go on while the device computes.
    """

    flops: float
    device_memory: float
    device_bytes: int
    link: float
    host_memory: float
    overlaps: bool = True


_PCIE_4, _PCIE_5 = 31.5e9, 63.0e9  # x16, one direction, after 128b/130b coding (PCI-SIG)

#: Hosts are assumptions, for datasheets of devices do not name them: memory channels as servers of that time have them,
#: per socket: eight of DDR4-3200 (204.8 GB/s) or DDR5-4800 (307.2 GB/s); a desktop's two of DDR5-5600 (89.6 GB/s).
MACHINES: dict[str, Machine] = {
    # NVIDIA H200 Tensor Core GPU datasheet, SXM: 989 TFLOPS bf16 dense (1,979 with sparsity), 141 GB at 4.8 TB/s.
    "h200": Machine(989e12, 4.8e12, 141 * 10**9, _PCIE_5, 307.2e9),
    # NVIDIA H100 Tensor Core GPU datasheet, SXM: 989 TFLOPS bf16 dense, 80 GB at 3.35 TB/s, PCIe 5.0.
    "h100": Machine(989e12, 3.35e12, 80 * 10**9, _PCIE_5, 307.2e9),
    # NVIDIA A100 80GB datasheet, SXM: 312 TFLOPS bf16, 2,039 GB/s, PCIe 4.0.
    "a100": Machine(312e12, 2.039e12, 80 * 10**9, _PCIE_4, 204.8e9),
    # NVIDIA L40S datasheet: 362 TFLOPS bf16 dense (733 with sparsity), 48 GB at 864 GB/s, PCIe 4.0.
    "l40s": Machine(362e12, 864e9, 48 * 10**9, _PCIE_4, 204.8e9),
    # NVIDIA Ada GPU architecture whitepaper, RTX 4090: 165.2 TFLOPS bf16 with fp32 accumulation, 24 GB at 1,008 GB/s.
    "rtx4090": Machine(165.2e12, 1.008e12, 24 * 10**9, _PCIE_4, 89.6e9),
    # A server of 32 cores with AVX-512 at 2.5 GHz: 2 units x 16 lanes x 2 operations in fp32; the device is emulated in
    # the same memory, and a copy reads and writes it.
    "cpu": Machine(32 * 2.5e9 * 64, 204.8e9, 64 * 2**30, 100e9, 204.8e9, overlaps=False),
}


def machine(name: str) -> Machine:
    """A machine by name, in any case. Raises ConfigError: there is none."""
    found = MACHINES.get(name.lower()) if isinstance(name, str) else None
    if found is None:
        raise ConfigError(f"No machine {name!r} is known; there are {', '.join(map(repr, MACHINES))}.")
    return found


def machine_like(device_name: str) -> str:
    """The name in `MACHINES` of a device as its driver calls it ("NVIDIA A100-SXM4-80GB"); "a100" for others."""
    plain = "".join(device_name.lower().split())
    return next((name for name in MACHINES if name != "cpu" and name in plain), "a100")


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What a forward of a decoder takes: weights, arithmetic, and bytes of KV.

    Attributes:
        layers: with full attention, which are tiered; 0: there are none.
        hidden: size of the hidden state.
        heads, head_dim: of queries; of any size where no layer attends.
        kv_heads: of keys and values; likewise.
        parameters: all weights.
        active: of those that one token is multiplied with; less in a mixture of experts.
        itemsize: bytes of a number, in weights and KV.
        embedding: of the weights, a table of which a token reads one row.
        latent: numbers of a token in one layer where the cache holds these in place of keys and values, which the model
            expands from them (multi-head latent attention, DeepSeek-V2, section 2.1); 0: it holds keys and values.
        weight_itemsize: bytes of a weight, on average, where weights are quantised; 0: as `itemsize`.
        windowed, window: layers that keep the latest tokens only, and how many each does.
        recurrent, state_bytes: layers that keep a state, and bytes of all of a sequence's.
        growing: layers that are not tiered and keep KV of every token, next to a recurrent state (such a layer is one
            of `recurrent`, too) or to an indexer.
        expanded: numbers that a token's latents become in one layer, in each step: keys and values without positions,
            and the keys that are put together from them.
        expand_flops: operations that this takes.
        window_numbers: numbers of a token in a layer with a window, where these have other heads; 0: as in the others.
    """

    layers: int
    hidden: int
    heads: int
    head_dim: int
    kv_heads: int
    parameters: int
    active: int
    itemsize: int = 2
    embedding: int = 0
    latent: int = 0
    weight_itemsize: float = 0
    windowed: int = 0
    window: int = 0
    recurrent: int = 0
    state_bytes: int = 0
    growing: int = 0
    expanded: int = 0
    expand_flops: int = 0
    window_numbers: int = 0

    def __post_init__(self) -> None:
        sizes = self.hidden, self.heads, self.head_dim, self.kv_heads, self.active, self.itemsize
        if min(*sizes, self.layers + self.untiered) < 1 or self.layers < 0:
            raise ConfigError(f"{self} is no model: sizes are at least 1.")
        if self.read < self.active:
            raise ConfigError(f"{self}: more parameters are active than there are.")

    @property
    def kv_bytes(self) -> int:
        """Of one token in one layer."""
        return (self.latent or 2 * self.kv_heads * self.head_dim) * self.itemsize

    @property
    def weight_bytes(self) -> int:
        """Of all weights."""
        return int(self.parameters * (self.weight_itemsize or self.itemsize))

    @property
    def untiered(self) -> int:
        """Layers that stay with the model; one that keeps two things is two."""
        return self.windowed + self.recurrent + self.growing

    @property
    def attends(self) -> bool:
        """Whether any layer has attention, and so heads of keys and values."""
        return self.layers + self.windowed + self.growing > 0

    @property
    def parts(self) -> int:
        """What the time of a forward is divided into: the layers that are tiered, or one where there are none."""
        return max(self.layers, 1)

    def bounded_bytes(self, context: int) -> int:
        """Of windows and states of a sequence, which stay on the device."""
        of_token = self.window_numbers * self.itemsize or self.kv_bytes
        return self.windowed * min(self.window, context) * of_token + self.state_bytes

    def growing_bytes(self, context: int) -> int:
        """Of the KV of a sequence that is not tiered, and stays on the device however long it gets."""
        return self.growing * context * self.kv_bytes

    def dense_bytes(self, context: int) -> int:
        """Of what the model expands from a sequence's latents in one layer, while it attends to them; else 0."""
        return context * (self.expanded + self.latent) * self.itemsize if self.latent else 0

    def beyond_bytes(self, context: int) -> int:
        """Of all of these: what a sequence takes of the device outside every budget."""
        return self.bounded_bytes(context) + self.growing_bytes(context) + self.dense_bytes(context)

    def expansion(self, flops: float, device_memory: float) -> float:
        """Seconds in one layer for a past token's latents, which each step expands; what is made is written and read.

        Args:
            flops: operations per second that products reach; inf: not known.
            device_memory: bytes per second that are reached.
        """
        return self.expand_flops / flops + 2 * self.dense_bytes(1) / device_memory

    @property
    def _launches(self) -> float:
        """Seconds, of a layer with full attention and of its part of the others."""
        return LAUNCHES * (self.layers + self.untiered) / self.parts

    @property
    def read(self) -> int:
        """Weights that a forward of many tokens reads."""
        return self.parameters - self.embedding

    def linear_seconds(self, where: Machine, tokens: int) -> float:
        """Of a layer without attention over the past: the weights are read, or the arithmetic is done."""
        # A few tokens reach a few experts; all read the rest, which is taken for a part of these.
        weights = min(self.read, tokens * self.active)
        read = weights / self.parts * (self.weight_itemsize or self.itemsize) / (where.device_memory * OF_DEVICE_MEMORY)
        work = 2 * self.active / self.parts * tokens / (where.flops * OF_FLOPS)
        return max(read, work) + self._launches

    def linear(self, where: Machine) -> Linear:
        """See `Linear`, for numbers of tokens up to 8192."""
        return Linear(tuple((float(n), self.linear_seconds(where, n)) for n in _TOKENS))

    def prefill(self, where: Machine) -> Prefill:
        """See `Prefill`. A fixed part reads the weights; arithmetic of 2 operations per weight and token, and of 4 per
        number of the heads for each pair of tokens in each layer."""
        flops, memory = where.flops * OF_FLOPS, where.device_memory * OF_DEVICE_MEMORY
        attending = self.layers + self.growing
        per_pair = 4 * attending * self.heads * self.head_dim / flops
        return Prefill(
            fixed=self.read * (self.weight_itemsize or self.itemsize) / memory + self.parts * self._launches,
            per_token=2 * self.active / flops,
            per_pair=per_pair,
            per_own=per_pair,
            per_past=attending * (self.kv_bytes / memory + self.expansion(flops, memory)),
        )


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights as they were counted in a model.

    Attributes:
        parameters: all.
        active: of those that one token is multiplied with, the output's among them.
        embedding: tables of which a token reads one row, and which nothing else multiplies.
        words: all tables, and the output: what stays as it is where weights are quantised.
    """

    parameters: int
    active: int
    embedding: int
    words: int


def link(where: Machine) -> Curve:
    """Seconds of a copy, in either direction."""
    return Curve.straight(COPY, where.link * OF_LINK)


def host_attention(where: Machine) -> HostAttention:
    """Seconds of attention on the host, on all cores: it reads keys and values once; queries of one token share them.

    Arithmetic is behind the reads up to a few queries, and doubles the time at about 16.
    """
    curve = Curve.straight(CALL, where.host_memory * OF_HOST_MEMORY)
    trip = ROUND_TRIP if where.overlaps else 0.0
    return HostAttention(((1, curve),), ((1.0, 1.0), (16.0, 2.0)), LOST if where.overlaps else 0.0, trip)


def device_attention(where: Machine) -> Curve:
    """Seconds of attention on the device by bytes of KV."""
    return Curve.straight(LAUNCHES / 2, where.device_memory * OF_DEVICE_MEMORY)
