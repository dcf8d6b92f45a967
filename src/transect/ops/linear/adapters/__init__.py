"""Low-rank adapters beside a product, another one for each row.

* ``add_low_rank.py``  the operator, its cost, and which kernels run
* ``triton.py``        its kernels: for few rows, and for tiles of rows
"""
