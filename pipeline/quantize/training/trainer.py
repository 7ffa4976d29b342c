"""Hugging Face's Trainer over a model of `StudentLinear` layers: the loss, the order of rows, the checkpoints.

The loss is computed from hidden states over blocks of positions, each block's logits made again in the backward
pass: the logits of a whole batch over a large vocabulary would cost more memory than the model.

A checkpoint of the Trainer holds only what trains. It is used again only when the digests that were written beside it,
after it was complete, still hold.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import SequentialSampler
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from pipeline.config.schema import FinetuneConfig
from pipeline.core.progress import Advance, Progress
from pipeline.errors import ToolError
from pipeline.host.files import write_atomic
from pipeline.quantize.training.student import Role

_POSITIONS_PER_BLOCK = 128
_DIGESTS = "complete.json"  # path -> sha256 of every other file of a checkpoint


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained: the model, who may ask it to teach, and the rows in the order of the steps.

    `rows` are token ids of one length; there are exactly as many as all steps take.
    """

    model: nn.Module
    role: Role
    method: Literal["qat", "qad"]
    rows: Sequence[Sequence[int]]


def train(task: Task, settings: FinetuneConfig, *, resume: Path, progress: Progress) -> list[dict[str, float]]:
    """Train the model in place and return the loss and learning rate of every step.

    Args:
        task: see `Task`.
        settings: steps, batch, learning rate, seed.
        resume: where checkpoints of this very training are kept; the newest whole one is continued.
        progress: told of every step.
    """
    _without_dropout(task.model)
    found = newest_checkpoint(resume)
    if found is not None:
        progress.note(f"continue training after step {found.name.rpartition('-')[2]}")
    arguments = TrainingArguments(
        output_dir=str(resume),
        max_steps=settings.steps,
        per_device_train_batch_size=settings.batch_size,
        gradient_accumulation_steps=settings.gradient_accumulation,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=settings.warmup_steps,
        weight_decay=0.0,
        max_grad_norm=1.0,
        optim="adamw_torch",
        seed=settings.seed,
        save_strategy="steps" if settings.save_every else "no",
        save_steps=settings.save_every or settings.steps,
        save_total_limit=2,
        logging_strategy="steps",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        use_cpu=next(task.model.parameters()).device.type == "cpu",
    )
    with progress.track(f"train {task.method}", settings.steps, "steps") as advance:
        trainer = _StudentTrainer(task, arguments, advance)
        trainer.train(resume_from_checkpoint=None if found is None else str(found))
    history = trainer.state.log_history
    return [
        {key: float(entry[key]) for key in ("step", "loss", "learning_rate")} for entry in history if "loss" in entry
    ]


def newest_checkpoint(directory: Path) -> Path | None:
    """Return the checkpoint with the most steps that is whole, and remove those that are not."""
    whole: list[Path] = []
    for found in directory.glob("checkpoint-*"):
        if _is_whole(found):
            whole.append(found)
        else:
            shutil.rmtree(found)
    return max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def _is_whole(directory: Path) -> bool:
    try:
        written = json.loads((directory / _DIGESTS).read_text("utf-8"))
        return bool(written == _digests(directory))
    except (OSError, ValueError):
        return False


def _digests(directory: Path) -> dict[str, str]:
    digests = {}
    for path in sorted(directory.iterdir()):
        if path.name != _DIGESTS:
            with path.open("rb") as file:
                digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


class _StudentTrainer(Trainer):  # type: ignore[misc]  # transformers is untyped
    """A Trainer whose loss is ours and whose checkpoints hold only what trains."""

    def __init__(self, task: Task, arguments: TrainingArguments, advance: Advance) -> None:
        super().__init__(
            model=task.model,
            args=arguments,
            train_dataset=[{"input_ids": torch.tensor(row)} for row in task.rows],
            callbacks=[_Listener(advance)],
        )
        self.remove_callback(PrinterCallback)
        self._loss = _distillation if task.method == "qad" else _next_token
        self._role = task.role
        self.model_accepts_loss_kwargs = False  # the loss is a mean; Trainer divides it by the accumulation

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:  # noqa: ANN401 - transformers' name
        """Rows come in the order of the task: one pass over them is the training."""
        return SequentialSampler(self.train_dataset if train_dataset is None else train_dataset)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Mapping[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Mean loss per position.

        Raises:
            ToolError: it is not a number, so every later step would be wasted.
        """
        del return_outputs, num_items_in_batch
        loss = self._loss(self.accelerator.unwrap_model(model), self._role, inputs["input_ids"])
        if not torch.isfinite(loss):
            raise ToolError(
                f"training diverged: the loss of step {self.state.global_step + 1} is not a number",
                hint="Lower finetune.learning_rate.",
            )
        return loss

    def _save(self, output_dir: str | None = None, state_dict: object = None) -> None:
        del state_dict
        directory = Path(output_dir or self.args.output_dir)
        directory.mkdir(parents=True, exist_ok=True)
        trained = {name: value.detach() for name, value in self.model.named_parameters() if value.requires_grad}
        save_file(trained, directory / "model.safetensors", metadata={"format": "pt"})


class _Listener(TrainerCallback):  # type: ignore[misc]  # transformers is untyped
    """Counts steps, and seals each checkpoint once it is complete."""

    def __init__(self, advance: Advance) -> None:
        self._advance = advance
        self._told = 0

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **_: object) -> None:  # noqa: ANN401
        """Tell the steps since the last call; the first call after a resume tells those of the earlier run too."""
        del args, control
        self._advance(state.global_step - self._told)
        self._told = state.global_step

    def on_save(self, args: TrainingArguments, state: Any, control: Any, **_: object) -> None:  # noqa: ANN401
        """Write the digests of a complete checkpoint beside it."""
        del control
        directory = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        content = json.dumps(_digests(directory), indent=2, sort_keys=True) + "\n"
        write_atomic(directory / _DIGESTS, content.encode())


def _without_dropout(model: nn.Module) -> None:
    """Training switches dropout on, and a student that drops what its teacher does not cannot follow it."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]  # a plain attribute of attention layers


def _distillation(model: Any, role: Role, ids: torch.Tensor) -> torch.Tensor:  # noqa: ANN401 - a transformers model
    """Mean over positions of KL(teacher || student) of the next token's distribution, in nats."""
    head = model.get_output_embeddings()

    def block(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), role.teacher():
            wanted = torch.log_softmax(head(teacher), dim=-1)
        given = torch.log_softmax(head(student), dim=-1)
        return nn.functional.kl_div(given, wanted, reduction="sum", log_target=True)

    with torch.no_grad(), role.teacher():
        teacher = _flat(model.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    student = _flat(model.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    return _mean_over_blocks(block, student, teacher)


def _next_token(model: Any, role: Role, ids: torch.Tensor) -> torch.Tensor:  # noqa: ANN401 - a transformers model
    """Mean negative log-likelihood of each token given those before it, in nats."""
    del role
    head = model.get_output_embeddings()

    def block(student: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(head(student), targets, reduction="sum")

    student = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    return _mean_over_blocks(block, _flat(student), ids[:, 1:].reshape(-1))


def _flat(states: torch.Tensor) -> torch.Tensor:
    return states.reshape(-1, states.shape[-1])


def _mean_over_blocks(
    block: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], student: torch.Tensor, wanted: torch.Tensor
) -> torch.Tensor:
    total = student.new_zeros(())
    for start in range(0, len(student), _POSITIONS_PER_BLOCK):
        positions = slice(start, start + _POSITIONS_PER_BLOCK)
        total = total + checkpoint(block, student[positions], wanted[positions], use_reentrant=False)
    return total / len(student)
