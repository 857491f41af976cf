"""The parts of a server that samplers read: configuration, a process group, CPU hashing."""

from types import SimpleNamespace

import pytest


@pytest.fixture(scope="module", autouse=True)
def runtime():
    from sglang_vericache.platform import bootstrap

    bootstrap.install()

    import torch
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
    with (
        get_context().override_server_args(**config),
        get_parallel().override(tp_group=group),
        # Compiling the stock samplers takes minutes on a CPU; their eager results are compared.
        torch.compiler.set_stance("force_eager"),
    ):
        yield
    if created:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def sampler(runtime):
    from sglang_vericache.sampling.sampler import RowSampler

    return RowSampler()


@pytest.fixture(scope="module")
def stock_sampler(runtime):
    from sglang.srt.layers.sampler import Sampler

    return Sampler()


@pytest.fixture(scope="module")
def one_thread():
    """Thousands of tiny operators: on a busy machine two threads wait for each other all along."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
