"""The model of a run, built or loaded for training, and the names of the parameters to train."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ..models.decoder import Decoder
from ..models.load import fill, stored_weights
from ..models.resolve import ModelSource, resolve
from ..models.weights_hf import save_hf
from ..ops.opset import OpSet, resolve_ops
from ..text.chat_template import ChatTemplate
from ..text.export import export_tokenizer
from ..text.tokenizer import Tokenizer
from .chat import run_template
from .config import TrainConfig
from .lora import attach, plain_state

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "mixed": torch.bfloat16}


@dataclass(frozen=True)
class Trainable:
    """A model and what belongs to it. ``parameters``: those that are trained, by canonical name."""

    model: Decoder
    source: ModelSource
    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    parameters: Mapping[str, nn.Parameter]
    adapted: bool

    @property
    def device(self) -> torch.device:
        return self.model.norm.weight.device

    def snapshot(self) -> dict[str, Tensor]:
        """The weights of the plain model by canonical name, copied to the CPU."""
        return plain_state(self.model)

    def write(self, state: Mapping[str, Tensor], directory: Path) -> None:
        """Write a snapshot as a model directory: config.json, safetensors, tokenizer."""
        save_hf(state, self.source.config, directory)
        export_tokenizer(self.source, directory)


def device_of(name: str) -> torch.device:
    """``auto`` is the GPU if there is one.

    Raises:
        ValueError: ``cuda`` and there is none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError('device = "cuda", but torch sees no GPU here: set device to "cpu" or "auto"')
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def training_ops(device: torch.device) -> OpSet:
    """Operators with gradients: Triton's on a GPU, the C++ kernels on the CPU, torch's where there is neither."""
    if device.type == "cpu":
        return resolve_ops(device, ("cpu", "torch"), differentiable=True)
    return resolve_ops(device, ("triton", "torch"), differentiable=True)


def from_scratch(config: TrainConfig) -> bool:
    """Whether a run starts from random weights."""
    return config.task == "pretrain" or config.load_format == "dummy"


def source_of(config: TrainConfig) -> ModelSource:
    """Where the model of a run is. ValueError if it cannot be found."""
    return resolve(config.model, load_format="dummy" if from_scratch(config) else "auto")


def teacher_of(config: TrainConfig) -> ModelSource:
    """Where the teacher of a distillation is. ValueError if none is named, or it cannot be found."""
    if not config.distill.teacher:
        raise ValueError('objective = "distill" needs a larger model: name it in distill.teacher')
    return resolve(config.distill.teacher)


def build(config: TrainConfig, tell: Callable[[str], None] = log.info) -> Trainable:
    """Build the model that ``config`` describes; adapters are attached, frozen parts frozen.

    Args:
        tell: is told what a person should know about it.

    Raises:
        ValueError: the model cannot be found or loaded, or does not suit the task.
    """
    device = device_of(config.device)
    source = source_of(config)
    if source.config.logit_softcap is not None:
        raise ValueError("models whose logits are soft-capped (Gemma 2) are served and not trained: take another one")
    model = Decoder(source.config, device="meta", dtype=DTYPES[config.precision], ops=training_ops(device))
    model = model.to_empty(device=device)
    if from_scratch(config):
        model.init_weights(generator=torch.Generator(device).manual_seed(config.seed))
    else:
        fill(model, stored_weights(source))
    model.requires_grad_(True)
    adapted = config.task in ("lora", "qlora")
    if config.task == "qlora":
        from .qlora import quantize_layers

        quantize_layers(model, config.lora.group)
    if adapted:
        attach(model, config.lora, seed=config.seed)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    tokenizer = Tokenizer.from_source(source)
    return Trainable(
        model,
        source,
        tokenizer if isinstance(tokenizer, Tokenizer) else None,
        run_template(source, tokenizer, config.data, tell),
        parameters,
        adapted,
    )
