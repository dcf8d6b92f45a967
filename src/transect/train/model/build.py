"""The model of a run, built or loaded for training, and the names of the parameters to train."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...checkpoints.adapter import StoredAdapter, merged_weights
from ...checkpoints.adapter_peft import write_adapter
from ...checkpoints.hf_out import save_hf
from ...checkpoints.load import adapter_of, fill, stored_weights
from ...checkpoints.peft_config import adapter_folder
from ...checkpoints.resolve import ModelSource, resolve, with_adapter
from ...models.decoder import Decoder
from ...models.stored import StoredWeights
from ...models.weights.dropout import Moment
from ...ops.opset import OpSet, resolve_ops
from ...spec.model import ModelConfig
from ...text.chat_template import ChatTemplate
from ...text.export import export_tokenizer
from ...text.model_text import template_text
from ...text.tokenizer import Tokenizer
from ..adapters.lora import attach, plain_state, settled, trained_adapter
from ..config import TrainConfig
from ..config.adapters import LoRAConfig
from ..config.objectives import objective_kind
from ..data.chat import run_template
from .new_tokens import grown_tables, write_with_tokens

if TYPE_CHECKING:
    from ...parallel.parallelize import Parallel

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "mixed": torch.bfloat16}


@dataclass(frozen=True)
class Trainable:
    """A model with its tokenizer, template and trained parameters.

    ``parameters``: those that are trained, by canonical name. ``own_template``: the chat template that the run brings
    in place of the model's; the model is to be served with it.
    """

    model: Decoder
    source: ModelSource
    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    parameters: Mapping[str, nn.Parameter]
    lora: LoRAConfig | None
    """Settings of the adapters; None if none are trained."""
    moment: Moment
    """Position in the run, for dropout; the trainer advances it."""
    device: torch.device
    """Computing device. The model is in host memory at first if its weights are streamed from there layer by layer."""
    own_template: str = ""
    weights: Callable[[], StoredWeights] | None = None
    """Function that yields the model's weights if they are not loaded yet: ranks read their parts of them."""
    parallel: Parallel | None = None
    """Distribution of the model over ranks, if there are several; ``model`` and ``parameters`` are then this rank's
    part."""

    @property
    def adapted(self) -> bool:
        """True if adapters are trained."""
        return self.lora is not None

    def snapshot(self, weights: Mapping[str, Tensor] | None = None) -> Callable[[Path], None]:
        """Copy the present weights to the CPU; return a function that writes them into a directory with the tokenizer:
        the adapter in PEFT's layout, or, if all weights are trained, the model in Hugging Face layout.

        Args:
            weights: these in place of the model's, by canonical name: where this process has a part of it.
        """
        if self.lora is not None:
            adapter = trained_adapter(self.model, self.lora)
            return lambda directory: self._write_adapter(adapter, directory)
        found = plain_state(self.model) if weights is None else weights
        return lambda directory: self._write_model(found, directory)

    def take(self, directory: Path) -> bool:
        """Read the weights of a checkpoint into what is trained beside the model; False if the model is trained."""
        return False

    def _write_model(self, weights: Mapping[str, Tensor], directory: Path) -> None:
        save_hf(weights, self.source.config, directory)
        self._write_text(directory)

    def _write_adapter(self, adapter: StoredAdapter, directory: Path) -> None:
        source = self.source if self.source.adapter is None else self.source.adapter.base
        base = str(source.path) if Path(source.name).expanduser().exists() else source.name
        write_adapter(directory, adapter, self.source.config, base=base)
        self._write_text(directory)

    def _write_text(self, directory: Path) -> None:
        """Write the tokenizer, and the chat template that the model was trained with."""
        export_tokenizer(self.source, directory)
        if self.own_template:
            (directory / "chat_template.jinja").write_text(self.own_template, encoding="utf-8")


def device_of(name: str) -> torch.device:
    """Return the device of a name; ``auto`` is the GPU if there is one.

    Raises:
        ValueError: ``cuda`` and there is none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError('device = "cuda", but torch sees no GPU here: set device to "cpu" or "auto"')
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def training_ops(device: torch.device) -> OpSet:
    """Resolve operators with gradients: Triton's on a GPU, the C++ kernels on the CPU, torch's if neither is
    available."""
    if device.type == "cpu":
        return resolve_ops(device, ("cpu", "torch"), differentiable=True)
    return resolve_ops(device, ("triton", "torch"), differentiable=True)


def from_scratch(config: TrainConfig) -> bool:
    """Return True if a run starts from random weights."""
    return config.task == "pretrain" or config.load_format == "dummy"


def source_of(config: TrainConfig) -> ModelSource:
    """Find the model of a run, with the adapter that it starts from.

    Raises:
        ValueError: one of them cannot be found, or adapters would be trained beside an adapter.
    """
    source = resolve(config.model, load_format="dummy" if from_scratch(config) else "auto")
    if config.task not in ("lora", "qlora"):
        return source
    if source.adapter is not None:
        raise ValueError(
            f"{config.model} is an adapter: to continue it set model to {source.adapter.base.path} and lora.start to "
            f"{source.adapter.path}; to train another one over it, merge it first (transect export --merge)"
        )
    return with_adapter(source, str(adapter_folder(config.lora.start))) if config.lora.start else source


def _with_new_tokens(source: ModelSource, config: TrainConfig) -> ModelSource:
    """Add ``config.new_tokens`` to the model, whose tokenizer is written into the run's folder."""
    if not config.new_tokens:
        return source
    folder = Path(config.run_dir) / "tokenizer"
    rows = max(write_with_tokens(source, config.new_tokens, folder), source.config.vocab_size)
    return replace(source, config=replace(source.config, vocab_size=rows), text=folder)


def _begun(source: ModelSource, start: StoredAdapter) -> StoredWeights:
    """Yield the weights of the base; the adapter's fully trained modules replace the base's."""
    assert source.adapter is not None
    base = source.adapter.base
    return merged_weights(stored_weights(base), base.config, replace(start, factors={}), source.config)


def _check_cap(config: TrainConfig) -> None:
    """Check that the run's objective supports a model's cap on logits.

    Raises:
        ValueError: it does not.
    """
    if config.objective != "next_token":
        raise ValueError(
            f'models whose logits are soft-capped (Gemma 2) train with objective = "next_token" alone, not with '
            f"{config.objective!r}: set that, or take another model"
        )
    if config.parallel.tensor > 1:
        raise ValueError(
            "models whose logits are soft-capped (Gemma 2) train with their head whole: set parallel.tensor to 1"
        )


def teacher_of(config: TrainConfig) -> ModelSource:
    """Find the teacher of a distillation. Raises ValueError if none is named, or it cannot be found."""
    if not config.distill.teacher:
        raise ValueError('objective = "distill" needs a larger model: name it in distill.teacher')
    teacher = resolve(config.distill.teacher)
    if teacher.config.logit_softcap is not None:
        raise ValueError(
            f"distill.teacher {config.distill.teacher} caps its logits (Gemma 2), which distillation does not know: "
            "name another one"
        )
    return teacher


def build(config: TrainConfig, tell: Callable[[str], None] = log.info, *, lean: bool = False) -> Trainable:
    """Build the model that ``config`` describes, and what is trained beside it; adapters are attached, frozen parts
    frozen.

    Args:
        tell: receives notices for the user.
        lean: give the model unwritten host memory, and its weights to be read later (``Trainable.weights``): the system
            provides memory when it is written. For all weights of a decoder without experts.

    Raises:
        ValueError: the model cannot be found or loaded, or does not suit the task.
    """
    device = device_of(config.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    source = source_of(config)
    if source.config.logit_softcap is not None:
        _check_cap(config)
    lora = settled(config.lora, config.new_tokens) if config.task in ("lora", "qlora") else None
    stored, source = source, _with_new_tokens(source, config)
    start = None
    if lora is not None and source.adapter is not None:
        start = adapter_of(stored)
    model = Decoder(source.config, device="meta", dtype=DTYPES[config.precision], ops=training_ops(device))
    model = model.to_empty(device="cpu" if lean or config.parallel.offload == "all" else device)
    later: Callable[[], StoredWeights] | None = None
    if lean:
        later = partial(_weights_of, stored, source.config, config, device)
    elif from_scratch(config):
        model.init_weights(generator=torch.Generator(device).manual_seed(config.seed))
    else:
        weights = stored_weights(stored) if start is None else _begun(stored, start)
        fill(model, grown_tables(weights, source.config.vocab_size))
    model.requires_grad_(True)
    moment = Moment()
    if config.task == "qlora":
        from ..adapters.qlora import quantize_layers

        quantize_layers(model, config.lora)
    if lora is not None:
        attach(model, lora, seed=config.seed, start=start, moment=moment)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    tokenizer = Tokenizer.from_source(source)
    made = Trainable(
        model,
        source,
        tokenizer if isinstance(tokenizer, Tokenizer) else None,
        run_template(source, tokenizer, config.data, tell),
        parameters,
        lora,
        moment,
        device,
        "" if config.data.chat_template in ("auto", "model") else template_text(config.data.chat_template),
        later,
    )
    kind = objective_kind(config.objective)
    if kind is None or kind.part is None:
        return made
    beside: Trainable = kind.part(config, made)
    return beside


def _weights_of(source: ModelSource, shape: ModelConfig, config: TrainConfig, device: torch.device) -> StoredWeights:
    """Return the weights, to be read later, with which ``build`` would fill a model of this shape."""
    if not from_scratch(config):
        return grown_tables(stored_weights(source), shape.vocab_size)
    model = Decoder(shape, device="meta", dtype=DTYPES[config.precision], ops=training_ops(device))
    return model.drawn_weights(generator=torch.Generator(device).manual_seed(config.seed))
