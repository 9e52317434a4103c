"""Learning which features to keep: hypernetwork, estimators, budget loss, text, trainer, resume."""
