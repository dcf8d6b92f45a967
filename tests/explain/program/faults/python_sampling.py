"""The next token is chosen by sorting a list."""

import torch

KIND = "python"
scores = torch.randn(8, 20_000)


@torch.inference_mode()
def faulty():
    chosen = []
    for row in scores:
        numbers = row.tolist()
        chosen.append(max(range(len(numbers)), key=numbers.__getitem__))
        chosen.append(sorted(numbers, key=lambda number: -number)[5])
    return chosen


@torch.inference_mode()
def fixed():
    return scores.argmax(1), scores.topk(6).values[:, 5]
