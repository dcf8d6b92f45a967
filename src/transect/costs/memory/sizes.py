"""Sizes of the pieces in which training computes. Code and memory accounts share them."""

LOSS_CHUNK = 1024
"""Tokens whose logits the fused loss holds at a time on a GPU; twice as many for narrow models."""
LOSS_ELEMENTS = 2**23
"""Logits that the loss in torch and log-probabilities hold at a time: 32 MiB of float32."""
SPLIT_ELEMENTS = {"cpu": 2**23, "gpu": 2**27}
"""Logits that a rank with part of the vocabulary holds at a time: as many as fit in the caches of a CPU, or enough to
make the launch costs of a GPU small."""
DISTILLATION_PARTS = 4
"""Divisor of ``LOSS_ELEMENTS`` in a distillation, which holds each row of logits about six times."""
RING_ROWS = 512
"""Queries whose scores ring attention holds at a time."""
BUCKET_BYTES = 25 * 2**20
"""Bytes of gradients that replicas send together: large enough for the links, small enough to start early."""
WIDE = 2**22
"""Elements of a 16-bit parameter that AdamW holds in float32 at a time, where it is not one kernel."""
SMALL_PARAMETER = 4096
"""Size below which the 8-bit optimizer keeps float32 moments of a parameter."""
MOMENT_BLOCK = 256
"""Moments that share a scale in the 8-bit optimizer."""
MOMENT_BLOCKS = 2**14
"""Blocks of moments that the 8-bit optimizer holds in float32 at a time."""
ADAPTER_COLUMNS = 64
"""Multiple of the spare columns for adapters in a merged product: the k of one step of the product. Rows of 128
bytes and their multiples then begin with a line of the L2 cache, and a bulk copy of one reads one line."""
