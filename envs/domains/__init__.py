"""Families of tasks, each a seeded generator."""
