"""A gated decoder made fast for learning: compiled layers, checkpoints, the loss without whole logits."""
