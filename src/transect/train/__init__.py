"""Data, loss, optimizers, trainer, checkpoints, LoRA. Nothing is here yet."""
