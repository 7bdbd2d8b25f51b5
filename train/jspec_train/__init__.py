"""Training drafters: data, features, loop, export, evaluation."""
