"""A sampler and a trainer of one model, built from a recipe, and responses with the log-probs of both.

The trainer scores given responses through Trimtab's packed pass, or as a plain padded batch.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimtab.diagnosis.tokens import TokenTable, k3
from trimtab.errors import Finding, TrimtabError
from trimtab.runs.provenance import versions
from trimtab.trainer import tasks
from trimtab.trainer.build_model import build_model, prepare_model, save_model_files
from trimtab.trainer.config import Config, is_recipe, load_config
from trimtab.trainer.engines.factory import build_engines
from trimtab.trainer.engines.stopping import eos_ids
from trimtab.trainer.models.logprobs import TokenBatch, pack_kept, score
from trimtab.trainer.models.sharding import named_weights
from trimtab.trainer.rollout.prompts import PromptStream
from trimtab.types import Completion, Engine, IntArray, Problem, Prompt, SamplingParams

SEED = 0
EXACT = 1e-8
"""Two float32 computations agree if their k3 is at most this."""
MARGIN = 4.0
"""Allowed ratio of a mismatch to the mismatch of the same pair with unchanged weights and nothing cached."""
MAX_LOGITS = 1 << 27
"""Largest number of logits in one forward: half a GiB in float32."""
PROMPTS = 64
TOP_LOGPROBS = 20
"""Largest number of ids per token whose log-probs vLLM and servers return by default."""
BOUNDS = {"invariant": 0.0, "float32": 1e-8, "16 bits": 1e-2, "quantized": 1e-1}
"""Largest k3 by numerics, from the ranges in `metrics.toml`."""


@dataclass(frozen=True)
class Check(Finding):
    """The result of a check, with its numbers by name (`figures`). `run_checks` sets `name`."""

    name: str = field(default="", kw_only=True)
    figures: dict[str, float] | None = None


@dataclass(frozen=True, eq=False)
class ScoredResponses:
    """Responses of the sampler, and the trainer's log-probs (tokens,) of each response.

    further: the trainer's log-probs (tokens, k) of further ids at each token, if requested.
    """

    prompts: Sequence[Prompt]
    completions: Sequence[Completion]
    logp_trainer: Sequence[np.ndarray]
    temperature: float
    further: Sequence[np.ndarray] = ()

    @cached_property
    def by_response(self) -> list[np.ndarray]:
        """For each response log trainer/sampler of its tokens, (tokens,)."""
        pairs = zip(self.logp_trainer, self.completions, strict=True)
        return [logp - one.logp_behavior for logp, one in pairs]

    @property
    def logp_behavior(self) -> np.ndarray:
        return np.concatenate([one.logp_behavior for one in self.completions])

    @property
    def k3(self) -> float:
        return float(k3(np.concatenate(self.by_response)).mean())

    def table(self) -> TokenTable:
        """Returns the tokens as `trimtab.diagnosis` reads them from a file."""
        lengths = [len(one.response_ids) for one in self.completions]
        prompts = {prompt.problem.id: number for number, prompt in enumerate(self.prompts)}
        responses = len(lengths)
        return TokenTable(
            starts=np.append(0, np.cumsum(lengths)),
            mask=np.ones(sum(lengths), dtype=bool),
            behavior=self.logp_behavior.astype(np.float32),
            proximal=np.concatenate(self.logp_trainer).astype(np.float32),
            ids=np.concatenate([one.response_ids for one in self.completions]),
            prompt=np.array([prompts[prompt.problem.id] for prompt in self.prompts]),
            prompt_length=np.array([float(len(prompt.ids)) for prompt in self.prompts]),
            temperature=np.full(responses, self.temperature),
            top_p=np.ones(responses),
            top_k=np.zeros(responses, dtype=np.int64),
            raw=np.zeros(responses, dtype=bool),
        )


Scores = tuple[Tensor, Tensor | None]
"""Log-probs (batch, time) of the responses, and (batch, time, k) of further ids if requested."""
Forward = Callable[[Any, TokenBatch, float, Tensor | None, Tensor | None], Scores]
"""Takes a model, a batch, the temperature, the ids that each token was drawn from, and further ids to score."""


def packed_forward(
    model: Any, batch: TokenBatch, temperature: float, kept: Tensor | None, further: Tensor | None
) -> Scores:
    """Scores a batch packed without padding, as Trimtab trains."""
    scores = score(model, batch, temperature=temperature, kept=kept, head=further)
    return scores.logp, scores.head


def padded_forward(
    model: Any, batch: TokenBatch, temperature: float, kept: Tensor | None, further: Tensor | None
) -> Scores:
    """Scores a padded batch with the model's own forward, as most frameworks do."""
    ids = torch.cat([batch.prompt_ids[batch.prompt_index], batch.response_ids], 1)
    mask = torch.cat([batch.prompt_mask[batch.prompt_index], batch.response_mask], 1)
    output = model(
        input_ids=ids,
        attention_mask=mask.long(),
        position_ids=(mask.cumsum(1) - 1).clamp(min=0),
        use_cache=False,
        logits_to_keep=batch.response_ids.shape[1] + 1,
    )
    scores = output.logits[:, :-1].float() / temperature
    if kept is not None:
        drawn_from = torch.where(kept < 0, kept[..., :1], kept).clamp(min=0)
        allowed = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, drawn_from, True)
        scores = scores.masked_fill(~allowed, -torch.inf)
    logps = scores.log_softmax(-1)
    others = None
    if further is not None:
        others = logps.gather(-1, further.clamp(min=0)).masked_fill(further < 0, -torch.inf)
    return logps.gather(-1, batch.response_ids[..., None])[..., 0], others


FORWARDS: dict[str, Forward] = {"trimtab": packed_forward, "transformers": padded_forward}
ATTENTION = "sdpa"
"""transformers' attention for `padded_forward`."""


@dataclass(eq=False)
class EnginePair:
    """The sampler and the trainer to check.

    weights_in_use: whether `named_weights` of the sampler returns the tensors in use. vLLM and servers return the
    tensors that were published last; their own tensors are fused, sharded or quantized.
    """

    engine: Engine  # the sampler
    model: Any  # the model of the trainer
    forward: Forward  # scores responses with the model
    autocast: bool  # whether the forward computes in bfloat16
    vocabulary: int
    tokenizer: Any
    prompts: Sequence[Prompt]  # at least 64
    sampling: SamplingParams  # as configured
    context: int | None
    bound: float  # largest k3 in nats per token
    top_logprobs: int  # number of ids per token whose log-probs the sampler can return
    stop_ids: frozenset[int]  # tokens that end a response
    lora: bool = False  # whether adapters are trained
    weights_in_use: bool = False
    version: int = 0

    def publish(self) -> None:
        """Loads the trainer's weights into the sampler, as a training run does."""
        self.version += 1
        self.engine.update_weights(named_weights(self.model), self.version)

    def sample(
        self, prompts: Sequence[Prompt], tokens: int, prefixes: Sequence[Completion] | None = None, **changes: Any
    ) -> list[Completion]:
        """Returns a response of `tokens` tokens to each prompt, at the configured temperature without truncation.

        changes: further fields of `SamplingParams`.
        """
        values = {"top_p": 1.0, "top_k": 0, "ignore_stop": True, "max_tokens": self.room(prompts, tokens)} | changes
        rows = None if prefixes is None else [[prefix] for prefix in prefixes]
        groups = self.engine.generate(prompts, 1, replace(self.sampling, **values), seed=SEED, prefixes=rows)
        return [group[0] for group in groups]

    @torch.no_grad()
    def score(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Completion],
        temperature: float | None = None,
        *,
        kept: bool = False,
        further: Sequence[IntArray] | None = None,
    ) -> ScoredResponses:
        """Scores responses with the trainer, by default at the configured temperature.

        kept: whether the distribution is restricted to the ids that the sampler drew each token from. further: more ids
        to score at each token, (tokens, k) by response.
        """
        temperature = self.sampling.temperature if temperature is None else temperature
        rows, more = [], []
        longest = max(len(one.response_ids) for one in completions)
        size = max(1, MAX_LOGITS // (self.vocabulary * longest))
        for start in range(0, len(completions), size):
            part = slice(start, start + size)
            ids = None if further is None else pack_kept([list(row) for row in further[part]], longest)
            logp, others = self._logps(prompts[part], completions[part], temperature, kept, ids)
            for row, one in enumerate(completions[part]):
                tokens = len(one.response_ids)
                rows.append(logp[row, :tokens].float().cpu().numpy())
                more += [] if others is None else [others[row, :tokens].float().cpu().numpy()]
        return ScoredResponses(prompts, completions, rows, temperature, more)

    def _logps(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Completion],
        temperature: float,
        kept: bool,
        further: Tensor | None,
    ) -> Scores:
        """Returns padded log-probs of one micro-batch; the arguments are those of `score`, `further` as one tensor."""
        batch = TokenBatch.pack(
            [prompt.ids for prompt in prompts],
            [one.response_ids for one in completions],
            range(len(prompts)),
            pad_id=self.tokenizer.pad_token_id,
        )
        device = next(self.model.parameters()).device
        batch = batch.to(device)
        time = batch.response_ids.shape[1]
        sets = pack_kept([one.sampling_mask or () for one in completions], time).to(device) if kept else None
        others = None if further is None else further[:, :time].to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.autocast):
            return self.forward(self.model, batch, temperature, sets, others)

    def compare(self, prompts: Sequence[Prompt], tokens: int, **changes: Any) -> ScoredResponses:
        return self.score(prompts, self.sample(prompts, tokens, **changes), changes.get("temperature"))

    def room(self, prompts: Sequence[Prompt], tokens: int) -> int:
        """Returns `tokens`, or less if the context has less room after the longest prompt."""
        longest = max(len(prompt.ids) for prompt in prompts)
        return tokens if self.context is None else max(1, min(tokens, self.context - longest))


def pair_config(
    model: str, sampler: str | None, dtype: str | None, urls: Sequence[str] | None, sets: Sequence[str]
) -> Config:
    chosen = [] if sampler is None else [f"engine.type={sampler}"]
    if dtype is not None:
        chosen += [f"engine.dtype={dtype}", f"model.autocast={'bfloat16' if dtype == 'bfloat16' else 'none'}"]
    if urls:
        chosen.append(f"engine.server.urls={json.dumps(list(urls))}")
    recipe: Any = model if is_recipe(model) else {"model": {"path": model}}
    config = load_config(recipe, [*chosen, *sets])
    if urls and config.engine.type != "server":
        raise TrimtabError(f"--url is where servers run, and the sampler is {config.engine.type}: add --sampler server")
    return config


def default_bound(config: Config, trainer: str) -> float:
    engine = config.engine
    if engine.changes_weights or engine.vllm.quantization or engine.vllm.kv_cache_dtype != "auto":
        return BOUNDS["quantized"]
    if config.numerics == "invariant" and engine.type == "embedded" and trainer == "trimtab":
        return BOUNDS["invariant"]
    return BOUNDS["float32" if {engine.dtype, _trainer_dtype(config)} == {"float32"} else "16 bits"]


def _trainer_dtype(config: Config) -> str:
    return config.model.dtype if config.model.autocast == "none" else config.model.autocast


def facts(config: Config, trainer: str) -> dict[str, str]:
    engine = config.engine
    quantized = "" if engine.quantize == "none" else f", {engine.quantize} weights"
    lora = f", LoRA rank {config.model.lora.rank}" if config.model.lora.rank else ""
    return {
        "model": config.model.path,
        "sampler": f"{engine.type}, {engine.dtype}{quantized}",
        "trainer": f"{trainer}, {_trainer_dtype(config)}{lora}",
        "numerics": config.numerics,
        "versions": ", ".join(f"{name} {version}" for name, version in versions(engine.type).items()),
    }


@contextmanager
def build_pair(
    config: Config, trainer: str, file: Path | None, bound: float, notify: Callable[[str], None]
) -> Iterator[EnginePair]:
    """Loads the model and starts the engine, which is closed at the end.

    trainer: a key of `FORWARDS`. file: prompts, one per line. notify: called with text while waiting for servers.
    """
    if trainer == "transformers" and config.numerics == "invariant":
        raise TrimtabError('numerics = "invariant" is of the trimtab trainer: use --trainer trimtab')
    lines = [] if file is None else _lines(file)
    if config.threads:
        torch.set_num_threads(config.threads)
    loaded = build_model(config)
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder) / "model"  # an engine reads the model's config there
        save_model_files(loaded.model, loaded.tokenizer, files)
        with closing(build_engines(config, loaded, files, notify)[0]) as engine:
            model: Any = prepare_model(loaded.model, config)
            if trainer == "transformers":
                model.set_attn_implementation(ATTENTION)
            vocabulary = model.get_input_embeddings().num_embeddings
            limits = (getattr(model.config, "max_position_embeddings", None), config.engine.context)
            yield EnginePair(
                engine=engine,
                model=model,
                forward=FORWARDS[trainer],
                autocast=config.model.autocast == "bfloat16",
                vocabulary=vocabulary,
                tokenizer=loaded.tokenizer,
                prompts=_prompts(config, loaded.tokenizer, lines),
                sampling=SamplingParams(config.sampling.temperature, config.sampling.top_p, config.sampling.top_k),
                context=min((limit for limit in limits if limit), default=None),
                bound=bound,
                top_logprobs={"embedded": vocabulary, "vllm": TOP_LOGPROBS, "server": 0}[config.engine.type],
                stop_ids=eos_ids(loaded.tokenizer, model.config, loaded.model.generation_config),
                lora=bool(config.model.lora.rank),
                weights_in_use=config.engine.type == "embedded" and not config.engine.changes_weights,
            )


def _lines(file: Path) -> list[str]:
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise TrimtabError(f"--prompts {file} cannot be read: {error}") from None
    if not lines:
        raise TrimtabError(f"--prompts {file} has no line with text: write a prompt into each line")
    return lines


def _prompts(config: Config, tokenizer: Any, lines: Sequence[str]) -> Sequence[Prompt]:
    """Returns `PROMPTS` prompts: the lines, repeated as often as needed; without lines those of the recipe's task."""
    if not lines:
        stream = PromptStream(tasks.build(config.task.name, **config.task.keywords), tokenizer, config.seed)
        return stream.at(0, PROMPTS)
    # A template writes the special tokens that a prompt needs; the tokenizer would add them again.
    texts = itertools.islice(itertools.cycle(lines), PROMPTS)
    ids = [np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64) for text in texts]
    return [Prompt(Problem(f"line {number % len(lines) + 1}", "", ""), "", row) for number, row in enumerate(ids)]


def common_log_ratio(a: Sequence[Completion], b: Sequence[Completion]) -> np.ndarray:
    """Returns log(b / a) over the common beginning of each pair of responses, concatenated.

    The first token that differs is not compared, since the two log-probs are of different tokens.
    """
    parts = []
    for one, other in zip(a, b, strict=True):
        tokens = min(len(one.response_ids), len(other.response_ids))
        same = np.cumprod(one.response_ids[:tokens] == other.response_ids[:tokens]).astype(bool)
        parts.append((other.logp_behavior[:tokens] - one.logp_behavior[:tokens])[same])
    return np.concatenate(parts)
