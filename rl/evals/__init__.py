"""Evaluation: held-out likelihood, verified answers, and the statistics to compare them honestly."""
