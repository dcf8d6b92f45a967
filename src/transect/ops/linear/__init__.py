"""Matrix products.

* ``linear.py``           product with bias; on a GPU it calls ``many_rows/`` or ``few_rows/`` by the number of rows
* ``gate_up.py``          gate and up projections of an MLP in one product, with the activation
* ``fixed_order.py``      both in one order of sums, by the tiles of ``many_rows/``
* ``stream_products.py``  products with the residual stream's norms inside, for decode steps
* ``many_rows/``          bound by arithmetic: tensor cores and fused epilogues
* ``few_rows/``           up to 256 rows, bound by the bytes of the weight
* ``packed/``             weights of 4 and 8 bits, and blocks of GGUF files
* ``adapters/``           low-rank adapters beside a product, another one for each row
"""
