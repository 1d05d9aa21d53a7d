"""specplug: which draft positions are worth verifying now? The engine-free core: torch and numpy only."""

__version__ = "0.1.0"
