"""What stock SGLang lacks on a plain CPU; inert on CUDA."""

from sglang_vericache.platform.bootstrap import install as prepare

__all__ = ["prepare"]
