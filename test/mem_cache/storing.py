"""A small host pool and stores that fail on request."""

import threading

import torch

from sglang_vericache.mem_cache.storage_stores import Store

LAYERS, PAGE, SLOTS, HEADS, DIM = 2, 4, 64, 1, 8


class Pool:
    """What ``SafeStorage`` uses of SGLang's host pools, laid out ``layer_first``."""

    layout, page_size, dtype = "layer_first", PAGE, torch.bfloat16

    def __init__(self):
        self.kv_buffer = torch.zeros((2, LAYERS, SLOTS, HEADS, DIM), dtype=self.dtype)

    def get_data_page(self, index, flat=True):
        page = self.kv_buffer[:, :, index : index + PAGE]
        return page.flatten() if flat else page

    def set_from_flat_data_page(self, index, data_page):
        shape = (2, LAYERS, PAGE, HEADS, DIM)
        self.kv_buffer[:, :, index : index + PAGE] = data_page.reshape(shape)

    def fill(self, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.kv_buffer.copy_(torch.randn(self.kv_buffer.shape, generator=generator))
        return self


class MemoryStore(Store):
    """A dictionary. ``before`` runs in every call and may raise or block."""

    def __init__(self):
        self.objects = {}
        self.calls = []
        self.before = lambda operation: None
        self.lock = threading.Lock()

    def exists(self, names):
        self._begin("exists")
        return [name in self.objects for name in names]

    def read(self, names, records):
        self._begin("read")
        sizes = []
        for name, record in zip(names, records, strict=True):
            data = self.objects.get(name)
            if data is None:
                return [*sizes, None]
            record[: len(data)] = data
            sizes.append(len(data))
        return sizes

    def write(self, names, objects):
        self._begin("write")
        for name, data in zip(names, objects, strict=True):
            self.objects[name] = data.clone()

    def remove(self, name):
        self._begin("remove")
        del self.objects[name]

    def clear(self):
        self.objects.clear()

    def _begin(self, operation):
        with self.lock:
            self.calls.append(operation)
        self.before(operation)


def indices(*pages):
    """Host slots of pages by number."""
    return torch.cat([torch.arange(p * PAGE, (p + 1) * PAGE) for p in pages])
