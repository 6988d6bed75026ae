"""What a run says about itself: `metrics.jsonl` is the truth, everything else here mirrors, draws or replays it.

Importing this package costs nothing: wandb, matplotlib and rich are loaded by the one function that needs them.
"""
