"""Data, loss, optimizers, trainer, checkpoints, LoRA. Nothing is here yet; the level keeps its place in the order."""
