"""The account of a GPU's memory, measured before the KV cache is made; the cache gets the rest."""

from __future__ import annotations

from dataclasses import dataclass

from ..units import GIB


@dataclass(frozen=True, slots=True)
class MemoryAccount:
    """Bytes on one GPU. ``usable`` is the total times the share that the engine may fill."""

    total: int
    usable: int
    others: int
    """Memory in use before the engine loaded anything: other programs, the CUDA context."""
    weights: int
    tables: int
    """Bytes of the angles of rotary embedding and the steps' inputs."""
    largest_step: int
    """Activations and logits of the largest step, measured by running it."""
    graphs: int
    """Bytes reserved for CUDA graphs, and for requests with penalties or biases."""

    @property
    def for_cache(self) -> int:
        """Memory left for keys and values; negative if the rest does not fit."""
        return self.usable - self.others - self.weights - self.tables - self.largest_step - self.graphs

    def lines(self, cache: int) -> list[str]:
        """Write the account as text, with a KV cache of ``cache`` bytes in it."""
        rest = self.total - self.others - self.weights - self.tables - self.largest_step - self.graphs - cache
        parts = (
            ("other programs and the CUDA context", self.others),
            ("weights", self.weights),
            ("rotary table, inputs of steps", self.tables),
            ("largest step (measured)", self.largest_step),
            ("CUDA graphs, penalty counts (kept free)", self.graphs),
            ("KV cache", cache),
            ("left free", rest),
            ("total", self.total),
        )
        return [f"{size / GIB:8.2f} GiB  {name}" for name, size in parts]


def refusal(account: MemoryAccount, needed: int, max_model_len: int, bytes_per_token: float) -> str:
    """Describe the smallest change of each kind if the cache does not hold one sequence of ``max_model_len`` tokens,
    ``needed`` bytes."""
    missing = needed - account.for_cache
    share = (account.usable + missing) / account.total
    advice = []
    if share <= 0.98:
        advice.append(f"raise gpu_memory_utilization to {share + 0.005:.2f}")
    if account.for_cache >= 64 * bytes_per_token:
        advice.append(f"lower max_model_len to {int(account.for_cache // bytes_per_token)}")
    if account.largest_step > missing:
        advice.append("lower max_num_batched_tokens or max_num_seqs, which set the size of the largest step")
    if not advice:
        advice.append("take a smaller model, or free the GPU of other programs")
    return (
        f"the KV cache of one sequence of {max_model_len} tokens takes {needed / GIB:.2f} GiB, and "
        f"{max(0, account.for_cache) / GIB:.2f} GiB are left on the GPU: {'; or '.join(advice)}\n"
        + "\n".join(account.lines(max(0, account.for_cache)))
    )
