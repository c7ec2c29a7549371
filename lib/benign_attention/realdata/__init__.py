"""Real data: where it comes from, and the models that are trained on it."""
