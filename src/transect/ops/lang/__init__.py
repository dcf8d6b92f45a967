"""Write, compile and find kernels.

* ``jit.py``         where Triton kernels run: a GPU, the interpreter, or nowhere; dependent launch
* ``tiles.py``       what Triton kernels on tiles share
* ``gluon_language.py``  Gluon under one set of names for every Triton
* ``philox.py``      random numbers from counters, the same on every device
* ``cuda_build.py``  builds the ``.cu`` files with nvcc; ``cuda.py`` calls them through ctypes
* ``collecting.py``  finds the Triton kernels that some work needs without launching one
* ``parts.cuh``      compiles a source in parts; ``hopper.cuh``: Hopper's copies and barriers; ``wgmma.cuh``: its
  products; ``tensor_map.cuh``: descriptions of matrices for the copy engine; ``few_rows.cuh``: what the kernels of a
  decode step share; ``meeting.cuh``: blocks that wait for each other
"""
