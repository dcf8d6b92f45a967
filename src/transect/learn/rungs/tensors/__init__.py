"""Numbers in memory: ``strides``, ``host_memory``, ``python_to_cpp``, and a network on images: ``digits``."""
