"""Writes ``tests/data/nf4_bitsandbytes.json``: what bitsandbytes makes of ``matrix()``.

It needs ``pip install bitsandbytes``:

python tests/helpers/nf4_fixture.py
"""

import base64
import hashlib
import json
from pathlib import Path

import numpy as np
import torch

FILE = Path(__file__).parent.parent / "data" / "nf4_bitsandbytes.json"
SHAPE = (130, 128)


def matrix():
    """More than 256 blocks of 64, each of another size; no generator's numbers, which differ by version."""
    index = np.arange(SHAPE[0] * SHAPE[1], dtype=np.int64)
    numbers = (index * 2654435761 % 1000003 / 1000003 - 0.5) * (1 + index // 64 % 7)
    return torch.from_numpy(numbers.astype(np.float32)).view(SHAPE)


def digest(tensor):
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def main():
    import bitsandbytes
    from bitsandbytes import functional

    codes, state = functional.quantize_4bit(matrix(), blocksize=64, compress_statistics=True, quant_type="nf4")
    half = functional.quantize_4bit(matrix().bfloat16(), blocksize=64, compress_statistics=True, quant_type="nf4")

    def packed(tensor):
        return base64.b64encode(tensor.contiguous().numpy().tobytes()).decode()

    values = {
        "bitsandbytes": bitsandbytes.__version__,
        "codes": packed(codes.view(-1)),
        "scales": packed(state.absmax.view(-1)),
        "nested": packed(state.state2.absmax),
        "offset": packed(state.offset),
        "map": packed(state.state2.code),
        "dense": digest(functional.dequantize_4bit(codes, state)),
        "dense_bfloat16": digest(functional.dequantize_4bit(*half)),
    }
    FILE.write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    main()
