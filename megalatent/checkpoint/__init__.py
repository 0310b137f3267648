"""Checkpoints: loading plain and latent ones."""
