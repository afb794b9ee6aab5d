"""`Held`: what a cache holds of a memory: its layers, what they claim between two steps, and how all is given back."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from kvtier.attention.call import release_threads
from kvtier.attention.reader import LayerReader
from kvtier.config import DEVICE_BLOCK, HOST_BLOCK, CacheOptions
from kvtier.forward import admission
from kvtier.memory.owner import Owner
from kvtier.memory.storage.layout import BlockLayout
from kvtier.memory.tiered import TieredMemory
from kvtier.memory.tiers.device import ComputeDevice
from kvtier.tables.layer import LayerKV


def layout_for(keys: torch.Tensor, values: torch.Tensor, device: ComputeDevice, options: CacheOptions) -> BlockLayout:
    """The layout of a layer on a device whose keys and values are like these."""
    return BlockLayout.of(keys, values, options.block_size or (HOST_BLOCK if device.slabs is None else DEVICE_BLOCK))


class Held:
    """What a cache holds of a memory: apart from `Forward`, so that it can be given back when that is garbage."""

    def __init__(self, memory: TieredMemory) -> None:
        self.memory = memory
        self.owner: Owner = memory.new_owner()
        self.user: weakref.ref[Any] | None = None
        self.readers: dict[int, LayerReader] = {}

    def lengths(self) -> set[int]:
        """The distinct numbers of tokens in the layers that hold any."""
        return {x.layer.length for x in self.readers.values() if x.layer.length}

    def devices(self) -> list[ComputeDevice]:
        """Those that have layers, in the order in which they got the first one."""
        return list(dict.fromkeys(reader.device for reader in self.readers.values()))

    def layers_on(self, device: ComputeDevice) -> list[LayerKV]:
        """The layers of one device."""
        return [reader.layer for reader in self.readers.values() if reader.device is device]

    # Layers. Who makes one puts it among the readers. The caller holds the lock.

    def make(
        self, index: int, device: ComputeDevice, keys: torch.Tensor, values: torch.Tensor, options: CacheOptions
    ) -> LayerReader:
        """A layer without tokens for what these tensors, of one dtype, are like.

        Raises:
            MismatchError: no keys and values of a layer; nothing was made.
        """
        layer = self._empty(index, device, layout_for(keys, values, device, options))
        try:
            layer.check(keys, values)
            return self._read(layer, options)
        except Exception:
            self.memory.drop_set(self.owner, device, layer.blocks)
            raise

    def make_like(self, index: int, device: ComputeDevice, layout: BlockLayout, options: CacheOptions) -> LayerReader:
        """A layer without tokens, of a layout."""
        return self._read(self._empty(index, device, layout), options)

    def _empty(self, index: int, device: ComputeDevice, layout: BlockLayout) -> LayerKV:
        owner = self.owner
        blocks = self.memory.block_set(owner, device, layout, index)
        return LayerKV(index, layout, device, blocks, owner.counters)

    def _read(self, layer: LayerKV, options: CacheOptions) -> LayerReader:
        return LayerReader(layer, self.memory, self.owner, host_attention=options.host_attention)

    def drop(self, reader: LayerReader) -> None:
        """A layer ends."""
        reader.layer.forget()
        self.memory.drop_set(self.owner, reader.device, reader.layer.blocks)

    def rest(self, device: ComputeDevice, room: int) -> None:
        """Claim no more on a device than what its layers hold, and room for reading them."""
        claims = self.owner.claims
        claims[device] = admission.at_rest(self.layers_on(device), room, claims.get(device))

    def release(self) -> None:
        """Give everything back. The caller holds the lock."""
        release_threads(self.owner)
        for reader in self.readers.values():
            reader.layer.forget()
        self.readers.clear()
        for device in self.memory.devices:
            for blocks in [blocks for blocks in self.owner.sets if blocks in device.sets]:
                self.memory.drop_set(self.owner, device, blocks)
        self.memory.leave(self.owner)
        if self.memory.private:
            self.memory.reset()

    def join(self) -> None:
        """Join the memory. Whatever cuts this short, `release` finds the owner that has joined."""
        self.owner.user, self.owner.release = self.user, self.release
        self.memory.join(self.owner)

    def renew(self) -> None:
        """Join the memory again, empty."""
        self.owner = self.memory.new_owner()
        self.join()
