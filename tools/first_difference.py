"""Find the first module whose bits differ between the embedded sampler and the trainer, on fixed random texts.

    .venv/bin/python tools/first_difference.py true-on-policy
    .venv/bin/python tools/first_difference.py RECIPE --set model.path=Qwen/Qwen3-0.6B --set numerics=invariant

The sampler prefills the prompts together and decodes the responses token by token with a cache; the trainer runs one
packed pass with gradient under the recipe's autocast. No two texts have the same id at the same position, so position
and id say which token a row of a tensor belongs to. Modules are compared in the order of the trainer, inputs before
outputs: where an input is the first to differ, the model computes it outside of modules (attention, a residual sum).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from trimtab.trainer.build_model import build_model, prepare_model
from trimtab.trainer.config import load_config
from trimtab.trainer.engines.embedded.decoder import CachedDecoder, PrefillPlan
from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.trainer.engines.embedded.invariant_decoder import InvariantDecoder
from trimtab.trainer.engines.embedded.weight_quantization import weight_quantization
from trimtab.trainer.models.architecture import is_invariant
from trimtab.trainer.models.fused_head import log_probs
from trimtab.trainer.models.logprobs import TokenBatch, score

TEXTS, PROMPT, RESPONSE = 4, 70, 12  # attention with invariant numerics has blocks of 64 keys: the prompt is two
HEAD = "log-probs of the head"
Recording = dict[str, dict[int, Any]]  # input or output of a module -> token -> digest of its values, or the values
Side = Callable[[str | None], Recording]  # runs one side: digests, and the values of the named tensor


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe", help="a recipe with the embedded engine")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting")
    given = parser.parse_args()
    config = load_config(given.recipe, given.set)
    if config.engine.type != "embedded" or config.model.lora.rank:
        parser.error("needs the embedded engine and no adapter: --set engine.type=embedded --set model.lora.rank=0")
    loaded = build_model(config)
    dtype, rounding = getattr(torch, config.engine.dtype), weight_quantization(config)
    engine = EmbeddedEngine(loaded.model, loaded.tokenizer, dtype, quantization=rounding)
    trained = prepare_model(loaded.model, config)
    autocast = torch.autocast(
        loaded.model.device.type, dtype=torch.bfloat16, enabled=config.model.autocast == "bfloat16"
    )
    found = first_difference(*sides(engine._model, trained, autocast, loaded.tokenizer.pad_token_id))
    print(found or "all modules and log-probs are equal, bit for bit")
    return int(found is not None)


def first_difference(sampler: Side, trainer: Side) -> str | None:
    """Returns where the sides differ first, in the order of the trainer, and by how much; None where they agree."""
    ours, theirs = trainer(None), sampler(None)
    for name, rows in ours.items():
        shared = rows.keys() & theirs.get(name, {}).keys()
        if not shared:
            raise SystemExit(f"the sampler never ran {name}: the two sides are no models of one structure")
        if differing := [token for token in shared if rows[token] != theirs[name][token]]:
            again = trainer(name)[name], sampler(name)[name]
            largest = max(float(np.abs(again[0][token] - again[1][token]).max()) for token in differing)
            return f"{name}: {len(differing)} of {len(shared)} tokens differ, by {largest:.3g} at most"
    return None


def sides(sampler: Any, trainer: Any, autocast: Any, pad: int) -> tuple[Side, Side]:
    """Returns the sampler's and the trainer's side of one model."""
    rng = np.random.default_rng(0)
    allowed = np.setdiff1d(np.arange(trainer.get_input_embeddings().num_embeddings), [0, pad])
    longest = min(PROMPT + RESPONSE, getattr(trainer.config, "max_position_embeddings", PROMPT + RESPONSE))
    ids = np.stack([rng.choice(allowed, TEXTS, replace=False) for _ in range(longest)], 1)
    prompts, responses = ids[:, :-RESPONSE], ids[:, -RESPONSE:]
    answer = torch.from_numpy(responses).to(trainer.device)
    positions = torch.arange(longest - RESPONSE, longest, device=trainer.device).expand(TEXTS, -1)

    @torch.inference_mode()
    def sample(full: str | None) -> Recording:
        rows, tokens = torch.arange(TEXTS, device=sampler.device), torch.from_numpy(prompts).to(sampler.device)
        plan = PrefillPlan(list(tokens), [tokens[0, :0]] * TEXTS, rows, rows)
        with recorded(sampler, full) as (recording, add):
            exact = is_invariant(sampler)
            decoder = InvariantDecoder(sampler, plan) if exact else CachedDecoder(sampler, plan)
            logits = [decoder.first, *(decoder.step(column) for column in answer[:, :-1].T)]
            for now, column, position in zip(logits, answer.T, positions.T, strict=True):
                logp = log_probs if exact else native_log_probs
                add(HEAD, logp(now, column, 1.0).float(), keys(position, column))
        return recording

    def train(full: str | None) -> Recording:
        batch = TokenBatch.pack(list(prompts), list(responses), list(range(TEXTS)), pad_id=pad).to(trainer.device)
        with recorded(trainer, full) as (recording, add), autocast:
            add(HEAD, score(trainer, batch).logp, keys(positions, answer))
        return recording

    return sample, train


@contextmanager
def recorded(model: Any, full: str | None) -> Iterator[tuple[Recording, Callable[[str, Tensor, Tensor], None]]]:
    """Records inputs and outputs of all modules that compute something themselves, except of the head."""
    recording: Recording = {}
    tokens: list[Tensor] = []

    def add(name: str, values: Tensor, of: Tensor) -> None:
        rows = values.detach().reshape(of.numel(), -1).double().cpu().numpy()
        kept = rows if name == full else [hash(row.tobytes()) for row in rows]
        recording.setdefault(name, {}).update(zip(of.flatten().tolist(), kept, strict=True))

    def begin(_module: nn.Module, _args: Any, given: dict[str, Any]) -> None:
        tokens[:] = [keys(given["position_ids"], given["input_ids"])]

    def hook(name: str) -> Callable[..., None]:
        def record(_module: nn.Module, args: Any, given: dict[str, Any], result: Any) -> None:
            for half, values in ((f"input of {name}", (args, given)), (name, result)):
                leaves = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
                for number, leaf in enumerate(leaves):
                    if tokens[0].numel() in (leaf.shape[:1].numel(), leaf.shape[:2].numel()):
                        add(half if number == 0 else f"{half}, {number + 1}", leaf, tokens[0])

        return record

    with ExitStack() as stack:
        stack.enter_context(model.base_model.register_forward_pre_hook(begin, with_kwargs=True))
        for name, module in model.base_model.named_modules():
            if name and (not list(module.children()) or list(module.parameters(recurse=False))):
                stack.enter_context(module.register_forward_hook(hook(name), with_kwargs=True))
        yield recording, add


def native_log_probs(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    return (logits.float() / temperature).log_softmax(-1).gather(1, ids[:, None])[:, 0]


def keys(positions: Tensor, ids: Tensor) -> Tensor:
    """Returns one number for each token."""
    return (positions * 2**32 + ids).broadcast_to(ids.shape)


if __name__ == "__main__":
    raise SystemExit(main())
