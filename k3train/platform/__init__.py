"""What megatron-core needs from the machine. A leaf: it imports nothing else of the project but the error types."""

from k3train.platform.adam import FusedAdam, install_adam
from k3train.platform.cpu import install, installed, quieten

__all__ = ["FusedAdam", "install", "install_adam", "installed", "quieten"]
