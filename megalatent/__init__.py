"""Latent-feedback training of transformers on Megatron-Core.

Importing the package imports neither torch nor Megatron, so that light commands start at once.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
