"""What megatron-core needs from the machine. A leaf: it imports nothing else of the project but the error types."""

from k3train.platform.adam import FusedAdam, install_adam
from k3train.platform.cpu import install, installed, quieten
from k3train.platform.memory import keep_freed_memory

__all__ = ["FusedAdam", "install", "install_adam", "installed", "keep_freed_memory", "quieten"]
