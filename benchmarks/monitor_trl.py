"""What `trimtab.Monitor` adds to a step of TRL's `GRPOTrainer`, on SmolLM2-135M.

    .venv-bench/bin/python benchmarks/monitor_trl.py [--steps 3] [--completions 16] [--tokens 64]

The trainer is the one of `trimtab.adapters.trl` with `monitor=`; sampling is that of transformers, whose log-probs are
computed anew, in float32. `observe` is timed where the trainer calls it. A step has few tokens, so that what a call
costs at any size weighs more than in a run.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig

from shared import options_of
from trimtab.adapters.trl import GRPOTrainer
from trimtab.monitor import Monitor
from trimtab.trainer.models import bundled

QUESTIONS = [f"What is {17 + index} plus {83 - index}? Answer with a single number." for index in range(64)]


class TimedMonitor(Monitor):
    """Keeps the seconds of every call, with what it writes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seconds: list[float] = []

    def observe(self, **batch: Any) -> dict[str, float]:
        begin = time.perf_counter()
        metrics = super().observe(**batch)
        self.seconds.append(time.perf_counter() - begin)
        return metrics


class TimedSteps(TrainerCallback):
    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._begin = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self._begin)


def sampled(prompts: list[str], trainer: GRPOTrainer) -> dict[str, list[list[Any]]]:
    """Completions of equal length with the sampler's log-probs, one prompt at a time."""
    ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    tokens, found = trainer.args.max_completion_length, []
    for prompt in ids:
        with torch.no_grad():
            output = trainer.model.generate(
                torch.tensor([prompt]), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=True, pad_token_id=0
            )
            logits = trainer.model(output).logits[:, len(prompt) - 1 : -1].float()
        completion = output[:, len(prompt) :]
        found.append((completion[0].tolist(), logits.log_softmax(-1).gather(-1, completion[..., None])[0, :, 0]))
    return {
        "prompt_ids": ids,
        "completion_ids": [completion for completion, _ in found],
        "logprobs": [logps.tolist() for _, logps in found],
    }


def main() -> None:
    given = options_of(__doc__, model=str(bundled.folder()), steps=3, completions=16, tokens=64).parse_args()
    folder = tempfile.mkdtemp()
    monitor, steps = TimedMonitor(out=folder, on_alarm=print), TimedSteps()
    arguments = GRPOConfig(
        output_dir=folder,
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        model_init_kwargs={"dtype": "float32"},
        per_device_train_batch_size=given.completions,
        num_generations=8,
        max_completion_length=given.tokens,
        gradient_checkpointing=False,
        learning_rate=1e-6,
        max_steps=given.steps + 1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=given.model,
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": question} for question in QUESTIONS]),
        reward_funcs=lambda completions, **_: [text.count("e") / (1 + len(text)) for text in completions],
        rollout_func=sampled,
        callbacks=[steps],
        objective="token-tis",
        monitor=monitor,
    )
    trainer.train()
    seconds, step = (statistics.median(values[1:]) for values in (monitor.seconds, steps.seconds))
    size = f"{given.completions} x {given.tokens} tokens"
    print(f"{size}: observe {1e3 * seconds:.1f} ms, a step {step:.1f} s: {seconds / step:.2%}")


if __name__ == "__main__":
    main()
