"""The CPU kernels: a small C++ library, compiled at first use for the machine it is on, and called on raw pointers.

Read in this order:

* ``simd.h``       one vector type for AVX-512, AVX2 and plain machines; number formats; exp
* ``pool.h``       the team of threads, its barriers and its shared work lists
* ``pairs.h``      pairs of bfloat16 numbers for AVX512-BF16: products, look-ups of codes, rounding
* ``kinds.h``      how packed weights lie in memory: 4-bit, 8-bit, blocks of GGUF files, bf16, float32
* ``packed.h``     a weight that is packed so, its products and its rows
* ``linear.h``     y = x W^T: the loops; ``linear.cpp`` compiles them for some kinds at a time
* ``attention.h``  paged attention over a ragged batch
* ``norm.h``       RMSNorm, LayerNorm, rotary embedding
* ``experts.h``    the feed-forward half of a layer with a mixture of experts
* ``stack.h``      all decoder layers in one call
* ``products.h``, ``document_attention.h``, ``training.h``   training: dense products, attention, the rest; and back
* ``rounding.h``   float32 to bfloat16 by chance, for optimizers
* ``adamw.h``      AdamW on states in host memory, and gradients taken in
* ``native.cpp``   the C interface
* ``build.py``     finds a compiler, builds, caches
* ``library.py``   the same interface as Python functions on tensors; ``stack.py`` for ``stack.h``
* ``ceilings.py``  the rate of multiply-adds that registers allow
* ``packing.py``   weights into the layout of ``kinds.h``
* ``adamw.py``     ``adamw.h`` as Python functions
* ``training.py``  the kernels of training as Python functions, ``gradients.py`` as differentiable operators
"""
