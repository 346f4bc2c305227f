"""Training and evaluation: batches, losses, learner, loops, checkpoints, data."""

from models import startup

startup.prepare()
