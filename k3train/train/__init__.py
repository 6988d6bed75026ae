"""The training run: a short loop, schedules, checkpoints, and features as callbacks."""
