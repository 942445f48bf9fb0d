"""The adapters against the losses of their trainers: same batches, called alike, the numbers of the trainers' own code.

With TRIMTAB_PEERS set to a folder of checkouts (see tools/parity/from_hooks.py), what is frozen is computed again and
compared, and prime-rl's own trainer function runs with our loss.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.parity.conftest import Given, Peer
from tests.support.adapter_calls import CALLS, HALVES, call_tis
from tests.support.named_cases import in_one_test
from tests.support.peer_modules import install_nemo_rl
from torch import Tensor

from trimtab.adapters import areal, nemo_rl, openrlhf, prime_rl, skyrl, slime
from trimtab.adapters.loss_settings import SETTINGS
from trimtab.errors import TrimtabError

CLIP = {"clip_low": 0.2, "clip_high": 0.2}
ROOT, PEERS = Path(__file__).parents[2], os.environ.get("TRIMTAB_PEERS")


def zeros(given: Given, name: str) -> Tensor:
    """What trainers pass at padding."""
    return torch.where(given.mask, getattr(given, name), 0.0)


def run(given: Given, logp: Tensor, trainer: str, *, objective: str, filtered: float = 0.0, **keywords: Any) -> Tensor:
    """filtered: what NeMo-RL's log-probs with top-k and top-p are above those without."""
    names = ["behavior", "proximal", *(["reference"] if "kl_coef" in keywords else [])]
    batch = {name: zeros(given, name) for name in names} | {"mask": given.mask, "advantage": given.advantage}
    batch |= {"unfiltered": logp} if filtered else {}
    return CALLS[trainer](batch, logp + filtered if filtered else logp, objective, HALVES, keywords)[0]


def run_tis(given: Given, logp: Tensor, **objective: Any) -> Tensor:
    mask = given.mask
    flat = {
        name: [row[keep] for row, keep in zip(getattr(given, name), mask, strict=True)]
        for name in ("proximal", "behavior")
    }
    args, masks = Namespace(trimtab_objective=objective, use_tis=True), map(torch.ones_like, flat["proximal"])
    result, _, _ = call_tis(args, -(logp * given.advantage)[mask], flat["proximal"], flat["behavior"], masks)
    return result.sum() / mask.sum()


TOKENS, MEANS = {"aggregation": "token-mean", **CLIP}, {"aggregation": "seq-mean-token-mean", **CLIP}
PENALIZED = {"kl": "unbiased", "kl_coef": 0.05}
ICEPOP = {"objective": "icepop", "weight_min": 0.5, "weight_max": 2.0}
CONSTANT = {"aggregation": "constant", "length_max": 40, **CLIP}
GRPO = {"objective": "grpo"}
RUNS: dict[str, tuple[Callable[..., Tensor], dict[str, Any]]] = {
    "skyrl-token_mean": (run, {"trainer": "skyrl", **GRPO, **TOKENS}),
    "skyrl-sequence_mean": (run, {"trainer": "skyrl", **GRPO, **MEANS}),
    "skyrl-constant": (run, {"trainer": "skyrl", **GRPO, **CONSTANT}),
    "nemo-rl-token": (run, {"trainer": "nemo-rl", **GRPO, **TOKENS}),
    "nemo-rl-sequence": (run, {"trainer": "nemo-rl", **GRPO, **MEANS}),
    "nemo-rl-tis": (run, {"trainer": "nemo-rl", "objective": "token-tis", "weight_max": 2.0, **TOKENS}),
    "nemo-rl-icepop": (run, {"trainer": "nemo-rl", **ICEPOP, **TOKENS}),
    "nemo-rl-kl": (run, {"trainer": "nemo-rl", **GRPO, **PENALIZED, **TOKENS}),
    "nemo-rl-kl-sequence": (run, {"trainer": "nemo-rl", **GRPO, **PENALIZED, **MEANS}),
    "nemo-rl-kl-filtered": (run, {"trainer": "nemo-rl", **GRPO, **PENALIZED, **TOKENS, "filtered": 0.1}),
    "areal-grpo": (run, {"trainer": "areal", **GRPO, **TOKENS}),
    "openrlhf-token": (run, {"trainer": "openrlhf", **GRPO, **TOKENS}),
    "openrlhf-sequence": (run, {"trainer": "openrlhf", **GRPO, **MEANS}),
    "openrlhf-icepop": (run, {"trainer": "openrlhf", **ICEPOP, **TOKENS}),
    **{
        f"{name}-tis": (run_tis, {"name": "reinforce", "weight": {"bound": "clip", "min": 0.5, "max": 2.0}})
        for name in ("slime", "miles")
    },
    **{
        f"{name}-icepop": (run_tis, {"name": "icepop", "weight_min": 0.5, "weight_max": 2.0})
        for name in ("slime", "miles")
    },
}


@pytest.fixture(scope="module")
def hooks() -> Peer:
    return Peer("hooks")


@pytest.fixture(autouse=True)
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    install_nemo_rl(monkeypatch)


def test_no_frozen_case_is_left_out(hooks: Peer) -> None:
    assert hooks.cases == {*RUNS, "signatures"}


@in_one_test("case", RUNS)
def test_loss_and_gradient(hooks: Peer, given: Given, dtype: torch.dtype, case: str) -> None:
    called, options = RUNS[case]
    leaf = zeros(given, "current").requires_grad_()
    loss = called(given, leaf, **options)
    (gradient,) = torch.autograd.grad(loss, leaf)
    # SkyRL exponentiates in float32; one token of the heavy batch has a ratio of e^11.
    tolerance = 5e-5 if dtype == torch.float32 or case.startswith("skyrl") else 1e-6
    expected = hooks.tensor(case, given.name, "gradient")
    frozen = hooks.scalar(case, given.name, "loss")
    assert loss.item() == pytest.approx(frozen, rel=tolerance, abs=tolerance)
    torch.testing.assert_close(
        gradient.double(), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max())
    )


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("skyrl", skyrl.policy_loss("grpo")),
        ("nemo-rl", nemo_rl.ObjectiveLoss.__call__),
        ("areal", areal.actor_loss("grpo", aggregation="token-mean")),
        ("openrlhf", openrlhf.ObjectivePolicyLoss.forward),
        ("slime", slime.tis),
        ("miles", slime.tis),
    ],
)
def test_the_hook_is_called_with_these_names(hooks: Peer, name: str, function: Callable[..., Any]) -> None:
    names = hooks.text("signatures", "hooks", name).split()
    given = dict.fromkeys(names)
    if name in ("nemo-rl", "openrlhf"):
        given["self"] = None
    if name in ("slime", "miles"):  # Further keywords of `policy_loss_function`.
        given |= dict.fromkeys(("total_lengths", "response_lengths", "parallel_state", "max_seq_lens"))
    inspect.signature(function).bind(**given)


@pytest.mark.parametrize(("trainer", "form"), [("slime", "Tuple"), ("miles", "Name")])
def test_log_probs_are_scored_as_the_trainer_does(
    hooks: Peer, monkeypatch: pytest.MonkeyPatch, trainer: str, form: str
) -> None:
    """`loss` calls the trainer's own function, whose keywords and form of result differ between the two."""
    assert hooks.text("signatures", "hooks", f"{trainer}-returns") == form
    accepted = hooks.text("signatures", "hooks", f"{trainer}-scores").split()
    given: dict[str, Any] = {}

    def scored(_logits: Tensor, **keywords: Any) -> Any:
        assert set(keywords) <= set(accepted)
        given.update(keywords)
        values = {"log_probs": [torch.tensor([-1.0, -2.0], requires_grad=True)]}
        return (torch.empty(0), values) if form == "Tuple" else values

    monkeypatch.setattr(slime, "_score_function", lambda: scored)
    sizes: dict[str, Any] = {"total_lengths": [3], "response_lengths": [2], "unconcat_tokens": [torch.zeros(3)]}
    batch = sizes | {"loss_masks": [torch.ones(2)]}
    batch |= {"advantages": [torch.ones(2)], "log_probs": [torch.tensor([-1.0, -2.5])]}
    if form == "Tuple":
        batch |= {"rollout_top_p_token_ids": [[1]], "rollout_top_p_token_offsets": [[0, 1]]}
    else:  # With --qkv-format bshd, without which Miles passes none.
        batch |= {"max_seq_lens": [3]}
    named = {"trimtab_objective": {"name": "grpo", "clip_high": 0.2}}
    args = Namespace(**named, calculate_per_token_loss=False, rollout_top_p=0.9)
    loss, _ = slime.loss(args, batch, torch.zeros(1), torch.sum)
    assert loss.item() == pytest.approx(-(1 + 1.2) / 2)  # The second token is clipped.
    assert ("top_p_token_ids" in given) == (form == "Tuple")
    assert ("max_seq_lens" in given) == (form == "Name")


def test_slime_s_top_p_without_the_tokens_that_it_kept_is_refused(hooks: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """slime's own loss raises there. Miles' function does not renormalise, and its own loss goes on."""

    def stand_in(trainer: str) -> Callable[..., Any]:
        def score(*_: Any, **__: Any) -> dict[str, list[Tensor]]:
            return {"log_probs": [torch.zeros(2)]}

        names = hooks.text("signatures", "hooks", f"{trainer}-scores").split()
        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        score.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return score

    sizes: dict[str, Any] = {"total_lengths": [3], "response_lengths": [2], "unconcat_tokens": [torch.zeros(3)]}
    batch = sizes | {"loss_masks": [torch.ones(2)], "advantages": [torch.ones(2)], "log_probs": [torch.zeros(2)]}
    args = Namespace(trimtab_objective="grpo", calculate_per_token_loss=False, rollout_top_p=0.9)
    monkeypatch.setattr(slime, "_score_function", lambda: stand_in("slime"))
    with pytest.raises(TrimtabError, match=r"--rollout-top-p is 0\.9, and the batch has no tokens that top-p kept"):
        slime.loss(args, batch, torch.zeros(1), torch.sum)
    args.rollout_top_p = 1.0
    assert slime.loss(args, batch, torch.zeros(1), torch.sum)[0].item() == -1
    args.rollout_top_p = 0.9
    monkeypatch.setattr(slime, "_score_function", lambda: stand_in("miles"))
    assert slime.loss(args, batch, torch.zeros(1), torch.sum)[0].item() == -1


@pytest.mark.skipif(PEERS is None, reason="no checkouts: TRIMTAB_PEERS names a folder of them")
@pytest.mark.parametrize("trainer", ["miles", "slime"])
def test_the_options_that_are_refused_beside_the_loss_exist(trainer: str) -> None:
    assert PEERS is not None
    source = (Path(PEERS) / trainer / trainer / "utils" / "arguments.py").read_text()
    for option in (*SETTINGS["MILES"], "use_kl_loss", "use_rollout_logprobs", "get_mismatch_metrics"):
        assert f'"--{option.replace("_", "-")}"' in source, option
    # This pair is theirs to refuse.
    assert "use_rollout_logprobs and use_tis cannot be set at the same time" in source


MILES_SCORES = """
import sys; from argparse import Namespace; from collections.abc import Iterator; from pathlib import Path
import from_hooks, torch
from trimtab.adapters import slime
group = Namespace(size=1, rank=0, group=None)
space = {"torch": torch, "Iterator": Iterator, "get_parallel_state": lambda: Namespace(cp=group, tp=group)}
space["calculate_log_probs_and_entropy"] = lambda logits, tokens, *_, **__: (
    logits.log_softmax(-1).gather(-1, tokens[:, None]), None
)
from_hooks.load(space, Path(sys.argv[1]) / from_hooks.MILES_SCORES, "get_responses", from_hooks.SCORES)
slime._score_function = lambda: space[from_hooks.SCORES]
make = torch.Generator().manual_seed(0)
padded = torch.randn(2, 6, 7, generator=make)
tokens = [torch.randint(0, 7, (size,), generator=make) for size in (6, 5)]
options = {"true_on_policy_mode": False, "rollout_temperature": 1.0, "allgather_cp": False, "log_probs_chunk_size": -1}
for form, logits in (("thd", torch.cat([padded[0], padded[1, :5]])[None]), ("bshd", padded)):
    batch = {"response_lengths": [3, 2], "total_lengths": [6, 5], "unconcat_tokens": tokens}
    batch |= {"max_seq_lens": [6, 6] if form == "bshd" else None, "rollout_log_probs": None}
    batch |= {"loss_masks": [torch.ones(3), torch.ones(2)], "log_probs": [-torch.ones(3), -2 * torch.ones(2)]}
    batch |= {"advantages": [torch.ones(3), -torch.ones(2)]}
    args = Namespace(trimtab_objective="grpo", calculate_per_token_loss=False, qkv_format=form, rollout_top_p=1.0)
    vars(args).update(options)
    print(slime.loss(args, batch, logits, torch.sum)[0].item())
"""


@pytest.mark.skipif(PEERS is None, reason="no checkouts: TRIMTAB_PEERS names a folder of them")
def test_miles_scores_padded_sequences_as_packed_ones() -> None:
    packed, padded = called(MILES_SCORES)
    assert float(packed) == pytest.approx(float(padded), rel=1e-6)


def called(code: str, *arguments: str) -> list[str]:
    """The lines that a script prints beside the generators of the frozen numbers."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", code, str(PEERS), *arguments]
    generators = ROOT / "tools" / "parity"
    ended = subprocess.run(
        command, cwd=generators, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    return ended.stdout.splitlines()


@pytest.mark.skipif(PEERS is None, reason="no checkouts: TRIMTAB_PEERS names a folder of them")
def test_the_checkouts_compute_what_is_frozen(hooks: Peer) -> None:
    code = (
        "import json, sys; from pathlib import Path; import from_hooks, generate;"
        "recording = from_hooks.record(generate.make_batches(), Path(sys.argv[1]));"
        "print(json.dumps(recording.cases))"
    )
    (printed,) = called(code)
    cases = json.loads(printed)
    assert set(cases) == hooks.cases
    for case in RUNS:
        for batch, values in cases[case]["scalars"].items():
            # Some peers compute in float32, which processors round differently.
            assert values["loss"] == pytest.approx(hooks.scalar(case, batch, "loss"), rel=1e-7)
    assert {name: hooks.text("signatures", "hooks", name) for name in cases["signatures"]["scalars"]["hooks"]} == cases[
        "signatures"
    ]["scalars"]["hooks"]


CALLED = """
import sys; from functools import partial; from pathlib import Path
import from_prime_rl, generate, torch
from trimtab.adapters.prime_rl import loss
theirs = from_prime_rl.functions(Path(sys.argv[1]) / "prime-rl")
for name, batch in generate.each(generate.make_batches()):
    leaf = batch["current"].clone().requires_grad_()
    rows = [list(batch[key]) for key in ("behavior", "mask")]
    advantages = list(batch["advantage"].expand_as(leaf))
    function = partial(loss, objective="ipo", divergence_max=0.3)
    total, metrics = theirs["compute_loss"](
        list(leaf), rows[0], None, advantages, rows[1], None, None, None, function, int(batch["mask"].sum()), 1, 1
    )
    print(name, total.item(), sorted(metrics)[0])
"""


@pytest.mark.skipif(PEERS is None, reason="no checkouts: TRIMTAB_PEERS names a folder of them")
def test_prime_rl_calls_our_loss(prime_rl: Peer) -> None:
    for line in called(CALLED):
        name, value, metric = line.split()
        assert float(value) == pytest.approx(prime_rl.scalar("ipo-0.3", name, "loss"), rel=1e-6)
        assert metric.startswith("trimtab/")


RECORDED = """
import sys; from functools import partial; from pathlib import Path; from types import ModuleType, SimpleNamespace
import from_hooks, from_prime_rl, generate, torch
folder, logps = Path(sys.argv[1]), sys.argv[2]
theirs = from_prime_rl.functions(folder / "prime-rl")
module = sys.modules["prime_rl.trainer.rl.loss"] = ModuleType("prime_rl.trainer.rl.loss")
module.setup_rl_loss_fn = lambda config: partial(theirs["default_loss_fn"], loss_config=config)
interfaces = sys.modules["nemo_rl.algorithms.loss.interfaces"] = ModuleType("interfaces")
interfaces.MetricNormalizer = SimpleNamespace(TOKENS="tokens")
for name in ("nemo_rl", "nemo_rl.algorithms", "nemo_rl.algorithms.loss", "prime_rl.trainer", "prime_rl.trainer.rl"):
    sys.modules[name] = ModuleType(name)
from trimtab.adapters.nemo_rl import RecordedLoss as OfNeMo
from trimtab.adapters.openrlhf import _recorded
from trimtab.adapters.prime_rl import loss
from trimtab.adapters.recording import Dump
dump = Dump(logps)
options = {"dppo_mask_low": 0.2, "dppo_mask_high": 0.3, "adv_tau": 1.0, "kl_tau": 1e-3}
config = SimpleNamespace(**options)
def summed(function, batch, logp):
    parts = [
        function(theirs["LossInputs"](*(value[row].expand_as(logp[row]) for value in values)))
        for row in range(len(logp))
        for values in [(logp, batch["behavior"], batch["reference"], batch["advantage"], batch["mask"])]
    ]
    return torch.stack([part.loss for part in parts]).sum()
own = {
    "nemo-rl": from_hooks.nemo_rl(folder),
    "openrlhf": from_hooks.openrlhf(folder),
    "prime-rl": partial(summed, partial(theirs["default_loss_fn"], loss_config=config)),
}
recorded = {
    "nemo-rl": from_hooks.nemo_rl(folder, lambda one: OfNeMo(one, monitor=True)),
    "openrlhf": from_hooks.openrlhf(folder, lambda one: _recorded(one, dump, True)),
    "prime-rl": partial(summed, partial(loss, monitor=True, type="default", **options)),
}
for name, batch in generate.each(generate.make_batches()):
    for trainer in own:
        plain, ours = (generate.with_gradient(partial(f[trainer], batch), batch["current"]) for f in (own, recorded))
        print(trainer, name, bool(plain[0] == ours[0]), torch.equal(plain[1], ours[1]), plain[1].abs().max().item() > 0)
"""


@pytest.mark.skipif(PEERS is None, reason="no checkouts: TRIMTAB_PEERS names a folder of them")
def test_recorded_losses_are_the_trainers_own_bit_for_bit(tmp_path: Path) -> None:
    lines = [line.split() for line in called(RECORDED, str(tmp_path))]
    assert {trainer for trainer, *_ in lines} == {"nemo-rl", "openrlhf", "prime-rl"}
    for trainer, name, loss, gradient, moved in lines:
        assert (loss, gradient, moved) == ("True", "True", "True"), (trainer, name)
    assert len(list(tmp_path.iterdir())) == 2 * len(lines) / 3  # OpenRLHF's, in two micro-batches each.


@in_one_test("case", ["ipo-0.3", "ipo-0.05"])
def test_prime_rl_sums_over_sequences(prime_rl: Peer, given: Given, close: Callable[..., None], case: str) -> None:
    """As `compute_loss` calls it: one sequence at a time, the sum divided by the tokens of the batch."""
    leaf = zeros(given, "current").requires_grad_()
    total = leaf.new_zeros(())
    for row in range(len(leaf)):
        total = total + our_loss(given, leaf, row, float(case.removeprefix("ipo-"))).loss
    (gradient,) = torch.autograd.grad(total / given.mask.sum(), leaf)
    close(total.item() / given.mask.sum().item(), prime_rl.scalar(case, given.name, "loss"))
    close(gradient, prime_rl.tensor(case, given.name, "gradient"))


def our_loss(given: Given, leaf: Tensor, row: int, bound: float) -> prime_rl.LossOutputs:
    inputs = SimpleNamespace(
        trainer_logprobs=leaf[row],
        inference_logprobs=zeros(given, "behavior")[row],
        ref_logprobs=None,
        advantages=given.advantage[row].to(leaf.dtype).expand_as(leaf[row]),
        loss_mask=given.mask[row],
        loss_weights=None,
    )
    return prime_rl.loss(inputs, objective="ipo", divergence_max=bound)
