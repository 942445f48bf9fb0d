"""The model card of an exported run: base model, method with its equation, task and held-out accuracy."""

from __future__ import annotations

from pathlib import Path

from trimtab.config import Config
from trimtab.objectives.from_section import from_section
from trimtab.runs.layout import METRICS
from trimtab.runs.reader import read_run

FILE = "README.md"  # the name that model hubs show


def model_card(run: Path, config: Config, step: int, *, adapter: bool) -> str:
    """Returns the text, in the form that the Hugging Face Hub reads. Paths of this machine are left out."""
    base = None if Path(config.model.path).exists() else config.model.path
    # Functions of a user are not imported here: a run records their equation.
    equation = config.objective.equation or from_section(config.objective.model_dump()).equation()
    return "\n".join(
        [
            "---",
            *([f"base_model: {base}"] if base and "/" in base else []),  # as the hub names it
            f"library_name: {'peft' if adapter else 'transformers'}",
            "tags: [reinforcement-learning, trimtab]",
            "---",
            "",
            f"# {base or 'A model'}, trained on {config.task.name}",
            "",
            f"{'LoRA adapter' if adapter else 'Model'} after {step} of {config.trainer.steps} steps of reinforcement "
            f"learning with Trimtab, objective `{config.objective.name}`:",
            "",
            *(f"    {line}" for line in equation.splitlines()),
            "",
            *_results(run),
        ]
    )


def _results(run: Path) -> list[str]:
    metrics = run / METRICS
    if not metrics.is_file() or not metrics.stat().st_size:
        return ["It was not evaluated during training.", ""]
    rows = [
        f"| {task} | {accuracy.before:.3f} | {accuracy.after:.3f} |"
        for task, accuracy in read_run(run).accuracy().items()
        if accuracy.before is not None and accuracy.after is not None
    ]
    return ["| held-out greedy accuracy | before | at the end |", "|---|---|---|", *rows, ""]
