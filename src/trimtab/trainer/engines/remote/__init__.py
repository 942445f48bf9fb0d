"""An engine in another process of this machine."""
