"""Column names of each framework's files, how a layout is recognized, and how users can write such files.

The facts come from the frameworks' own source; docs/frameworks.md names the files and versions read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from trimtab.errors import TrimtabError, did_you_mean

LOGPS = ("logp_behavior", "logp_proximal", "logp_current")
TOKEN_ROLES = (
    *(*LOGPS, "logp_prefill", "logp_teacher", "response_ids", "loss_mask", "padding_mask"),
    *("loss_weight", "entropy", "policy_version", "turn"),
)
SAMPLING = ("temperature", "top_p", "top_k", "logprobs")
ROW_ROLES = (
    *("step", "group", "prompt", "proximal_version", "reward", "advantage", "sampling", *SAMPLING, "off_policy"),
    *("response_length", "prompt_length", "sample_id", "sample_mask"),
)
ROLES = TOKEN_ROLES + ROW_ROLES
SERVER_COLUMNS = ("output_token_logprobs", "meta_info", "messages_and_choices", "logprobs")
"""Columns of rows with a server's response that hold the sampler's log-probs: of SGLang, ART and OpenAI."""
VERSIONS = ("policy_version", "proximal_version")
"""Roles that are also read under these names in the files of every framework: few write them, and users add them."""
EITHER_SHAPE = ("policy_version", "advantage")
"""Roles that frameworks write per token or per response."""


@dataclass(frozen=True)
class Layout:
    """The file layout of a framework.

    columns: names by role, the preferred one first. signs: sets of names, any of which identifies the framework.
    padded: whether responses are padded on the right to one length, with masks that mark their ends.
    whole: whether lists span prompt and response, with an untrained prompt.
    repeats: whether the same responses may be written again into a later file.
    prompt_groups: whether responses to the same prompt tokens form a group, where no column says so; needs `whole`.
    step_in_name: regular expression of file names whose group is the step, where no column holds it.
    synchronous: why the sampler has the trainer's weights by default, so that tokens without versions are of age 0; ""
    where lag is the default, or where any trainer may have written the file.
    advice: the option that makes the framework write log-probs. trainer_advice: that for the trainer's only, if it
    differs.
    """

    framework: str
    columns: Mapping[str, tuple[str, ...]]
    signs: tuple[set[str], ...]
    advice: str
    trainer_advice: str = ""
    padded: bool = False
    whole: bool = False
    repeats: bool = False
    prompt_groups: bool = False
    step_in_name: str = ""
    synchronous: str = ""


_NOT_TRIMTAB = ("group", "sample_id", "sample_mask", "loss_weight")
TRIMTAB = Layout(
    "trimtab",
    {role: (role,) for role in ROLES if role not in _NOT_TRIMTAB}
    | {"group": ("group", "prompt_id"), "prompt": ("prompt_id",), "prompt_length": ("prompt_length", "prompt_ids")}
    | {"logp_behavior": ("logp_behavior", *SERVER_COLUMNS), "response_ids": ("response_ids", "output_ids")},
    ({"logp_behavior"}, {"logp_proximal"}, {"logp_current"}),
    "trimtab's own trainer writes it to trajectories/",
    "a server's response has the sampler's side only: add to each row what the trainer's forward pass gives the same "
    "tokens",
)
VERL = Layout(
    "verl",
    {
        "logp_behavior": ("rollout_log_probs",),
        "logp_proximal": ("old_log_probs",),
        "response_ids": ("responses",),
        "loss_mask": ("response_mask",),
        "padding_mask": ("attention_mask",),
        "entropy": ("entropys", "entropy"),
        "step": ("step",),
        "group": ("uid", "input"),
        "prompt": ("input",),
        "reward": ("score",),
        "advantage": ("advantages",),
    },
    (
        {"rollout_log_probs", "response_mask"},
        {"old_log_probs", "response_mask"},
        {"rollout_log_probs", "old_log_probs"},
        {"input", "output", "score", "step"},
    ),
    "set actor_rollout_ref.rollout.calculate_log_probs=True and TRIMTAB_DUMP=DIR (docs/frameworks.md)",
    "verl computes old_log_probs in every step with algorithm.rollout_correction.bypass_mode=False (the default); "
    "TRIMTAB_DUMP=DIR writes it (docs/frameworks.md)",
    padded=True,
    synchronous="verl's default trainer (trainer_mode=sync) sends its weights before every generation",
)
TRL = Layout(
    "trl",
    {
        "logp_behavior": ("sampling_per_token_logps",),
        "logp_proximal": ("old_per_token_logps",),
        "response_ids": ("completion_ids",),
        "loss_mask": ("tool_mask", "completion_mask"),
        "padding_mask": ("completion_mask",),
        "step": ("step",),
        "group": ("prompt",),
        "prompt": ("prompt",),
        "reward": ("reward",),
        "advantage": ("advantage", "advantages"),
    },
    ({"sampling_per_token_logps"}, {"old_per_token_logps"}, {"prompt", "completion", "advantage"}),
    "log_completions writes text only: use vLLM with vllm_importance_sampling_correction and dump=DIR of "
    "trimtab.adapters.trl.GRPOTrainer (docs/frameworks.md)",
    "TRL computes old_per_token_logps with use_vllm=True and vllm_importance_sampling_correction=True; dump=DIR of "
    "trimtab.adapters.trl.GRPOTrainer writes it (docs/frameworks.md)",
    padded=True,
    repeats=True,
    synchronous="TRL's GRPOTrainer sends its weights before every generation",
)
MILES = Layout(
    "miles",
    {
        "logp_behavior": ("rollout_log_probs",),
        "logp_proximal": ("log_probs",),
        "response_ids": ("tokens",),
        "loss_mask": ("loss_masks", "loss_mask"),
        "response_length": ("response_lengths", "response_length"),
        "entropy": ("entropy",),
        "policy_version": ("weight_version",),
        "step": ("step",),
        "group": ("prompt_key",),
        "reward": ("raw_reward",),
        "advantage": ("advantages",),
        "sample_id": ("sample_indices", "sample_index"),
    },
    (
        {"tokens", "response_lengths"},
        {"tokens", "response_length", "rollout_log_probs"},
        {"rollout_log_probs", "log_probs"},
    ),
    "rollout dumps hold the sampler's side only: run with --dump-details DIR, without --use-rollout-logprobs, and read "
    "DIR/train_data",
    synchronous="train.py of Miles and slime sends its weights before every generation",
)
PRIME_RL = Layout(
    "prime-rl",
    {
        "logp_behavior": ("inference_logprobs",),
        "logp_current": ("trainer_logprobs",),
        "response_ids": ("token_ids",),
        "loss_mask": ("loss_mask",),
        "loss_weight": ("rl_weights",),
        "entropy": ("entropy",),
        "step": ("step",),
        "advantage": ("advantages",),
    },
    ({"inference_logprobs"}, {"trainer_logprobs"}, {"traces"}),
    "set trainer.enable_token_export=true and read token_exports/",
    whole=True,
)
NEMO_RL = Layout(
    "nemo-rl",
    {
        "logp_behavior": ("generation_logprobs",),
        "logp_proximal": ("prev_logprobs",),
        "response_ids": ("token_ids",),
        "loss_mask": ("token_loss_mask",),
        "sample_mask": ("sample_loss_mask",),
        "reward": ("filtered_rewards", "rewards"),
        "advantage": ("advantages",),
    },
    ({"generation_logprobs"}, {"prev_logprobs"}, {"content", "input_lengths"}),
    "read the train_data_step*.jsonl of a GRPO or PPO run; with NeMo Gym they need "
    "env.should_log_nemo_gym_responses=false",
    "NeMo-RL computes prev_logprobs unless loss_fn.force_on_policy_ratio=true, which writes zeros: set it to false",
    padded=True,
    whole=True,
    prompt_groups=True,
    step_in_name=r"^train_data_step(\d+)\.jsonl",
    synchronous="NeMo-RL sends its weights before every generation, unless async_grpo.enabled=true",
)
OPEN_INSTRUCT = Layout(
    "open-instruct",
    {
        "logp_behavior": ("vllm_logprobs", "logprobs"),
        "logp_proximal": ("trainer_logprobs",),
        "response_ids": ("token_ids",),
        "loss_mask": ("response_mask",),
        "policy_version": ("model_steps",),
        "step": ("step",),
    },
    ({"trainer_logprobs", "response_mask"}, {"response_tokens", "logprobs", "finish_reason"}),
    "both sides are in the *_trainer_logprobs_step*.jsonl that the code of Tmax writes with --save_traces "
    "--save_trainer_logprobs true (docs/frameworks.md)",
    whole=True,
    prompt_groups=True,
)
LAYOUTS = {layout.framework: layout for layout in (TRIMTAB, OPEN_INSTRUCT, PRIME_RL, TRL, MILES, VERL, NEMO_RL)}
LOGP_COLUMNS = {name for layout in LAYOUTS.values() for role in LOGPS for name in layout.columns.get(role, ())}
TRAINER_COLUMNS = LOGP_COLUMNS - {name for layout in LAYOUTS.values() for name in layout.columns["logp_behavior"]}


def layout_of_framework(framework: str) -> Layout:
    """Returns the layout of a framework. `slime` writes the files of Miles."""
    name = "miles" if framework == "slime" else framework
    if name not in LAYOUTS:
        raise TrimtabError(f"unknown framework {framework!r}{did_you_mean(framework, [*LAYOUTS, 'slime'])}")
    return LAYOUTS[name]


def detect_layout(names: Iterable[str]) -> Layout | None:
    """Returns the first layout with a sign among the columns, or None."""
    present = set(names)
    return next((layout for layout in LAYOUTS.values() if any(sign <= present for sign in layout.signs)), None)
