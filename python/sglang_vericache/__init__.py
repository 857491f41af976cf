"""Exact long-context decoding for SGLang, drafted from a compressed KV cache.

Importing the package loads neither torch nor SGLang: the platform module has to act before them.
"""

__version__ = "0.1.0"
