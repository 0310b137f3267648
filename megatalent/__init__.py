"""Latent-feedback training of transformers on Megatron-Core."""
