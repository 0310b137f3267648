"""Training: the multi-pass step and its hooks into Megatron."""
