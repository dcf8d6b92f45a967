"""From one line to an engine of gradients: ``line``, ``xor``, ``chain_rule``, ``autograd``."""
