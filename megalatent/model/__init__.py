"""The latent-feedback model: Megatron's model, wrapped, with a fused stage input."""
