"""What is derived from the registry, with no operator named anywhere.

* ``accuracy.py``  every implementation against float64, beside the error of torch's own operator
* ``compile.py``   compiles kernels ahead of time for a GPU that need not be there, and reads the result
* ``bench.py``     measured time beside its floor and its peers
* ``search.py``    tries a launcher's knobs on the device
"""
