"""The parts of a server that samplers read: configuration, a process group, CPU hashing."""

import os
from types import SimpleNamespace

import pytest

# Compiling the stock samplers takes minutes on a CPU; their eager results are what is compared.
os.environ["TORCHDYNAMO_DISABLE"] = "1"


@pytest.fixture(scope="session", autouse=True)
def runtime():
    from sglang_vericache.platform import bootstrap

    bootstrap.install()

    import torch.distributed as dist
    from sglang.srt.runtime_context import get_context, get_parallel

    from sampling.murmur import register_reference_op

    register_reference_op()
    created = not dist.is_initialized()
    if created:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = SimpleNamespace(device_group=dist.group.WORLD, world_size=1)
    config = {
        "device": "cpu",
        "sampling_backend": "pytorch",
        "enable_custom_logit_processor": True,
    }
    with get_context().override_server_args(**config), get_parallel().override(tp_group=group):
        yield
    if created:
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def sampler(runtime):
    from sglang_vericache.sampling.sampler import RowSampler

    return RowSampler()


@pytest.fixture(scope="session")
def stock_sampler(runtime):
    from sglang.srt.layers.sampler import Sampler

    return Sampler()
