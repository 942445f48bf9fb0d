"""Files that the frameworks' own functions wrote (data/README.md): what is read, and how the rest is reported."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from tests.support.token_tables import values

from trimtab.diagnosis.output.as_json import as_dict
from trimtab.diagnosis.output.as_text import terminal_text
from trimtab.diagnosis.output.html_page import answers
from trimtab.diagnosis.pipeline import diagnose
from trimtab.diagnosis.reading import open_log
from trimtab.diagnosis.records import DataSummary
from trimtab.diagnosis.tokens import TokenTable
from trimtab.errors import TrimtabError

DATA = Path(__file__).parent / "data"


def read(*names: str | Path, **options: Any) -> tuple[TokenTable, DataSummary]:
    """The one table of files or folders; names are of `data`."""
    source = open_log([DATA / name for name in names], **options)
    (table,) = source.tables()
    return table, source.summary()


def test_verl_padding_is_cut_and_a_tool_token_stays_untrained() -> None:
    table, origin = read("verl/3.jsonl")
    rows = [json.loads(line) for line in (DATA / "verl/3.jsonl").read_text().splitlines()]
    assert origin.framework == "verl"
    assert origin.anchor == "proximal"
    assert table.starts.tolist() == [0, 5, 8, 12, 14]  # the lengths 5, 3, 4, 2 of the attention mask, of 5 padded
    assert table.mask.tolist() == [True, True, False, *[True] * 11]
    expected = [
        value for row, length in zip(rows, (5, 3, 4, 2), strict=True) for value in row["old_log_probs"][:length]
    ]
    expected[2] = 0  # 7.0 in the file, at a token that is not trained
    np.testing.assert_allclose(table.trainer, expected, rtol=1e-6)
    assert values(table, "group") == [0, 0, 1, 1]
    assert values(table, "reward") == [1, 0, 0, 1]
    np.testing.assert_allclose(table.advantage, [0.5, -0.5, -0.7, 0.7], rtol=1e-6)  # type: ignore[arg-type]
    assert [finding.name for finding in origin.findings] == ["age"]


def test_verl_tensors_read_as_the_lines_do() -> None:
    lines, _ = read("verl/3.jsonl")
    tensors, origin = read("verl/3.pt")
    assert origin.framework == "verl"
    np.testing.assert_array_equal(lines.starts, tensors.starts)
    np.testing.assert_array_equal(lines.behavior, tensors.behavior)
    np.testing.assert_array_equal(lines.ids, tensors.ids)
    np.testing.assert_allclose(lines.trainer, tensors.trainer, rtol=2**-8)  # the file holds bfloat16


def test_trl_repeats_a_batch_in_each_file_and_it_counts_once() -> None:
    one = pq.read_table(DATA / "trl/completions_00001.parquet").to_pylist()
    table, origin = read("trl")
    assert origin.framework == "trl"
    assert origin.files == 2
    assert origin.dropped == {"the same response again, in a later file": 4}
    assert np.diff(table.starts).tolist() == [sum(row["completion_mask"]) for row in one] == [1, 6, 6, 6]
    np.testing.assert_allclose(table.behavior[1:7], one[1]["sampling_per_token_logps"], rtol=1e-6)
    np.testing.assert_allclose(table.trainer[1:7], one[1]["old_per_token_logps"], rtol=1e-6)
    np.testing.assert_allclose(values(table, "advantage"), [row["advantage"] for row in one])


def test_trl_tool_tokens_are_untrained(tmp_path: Path) -> None:
    row = {
        "prompt": "q", "completion": "a", "advantage": 0.5, "step": 1,
        "completion_ids": [5, 6, 7, 8, 0], "completion_mask": [1, 1, 1, 1, 0], "tool_mask": [1, 0, 0, 1, 1],
        "sampling_per_token_logps": [-1.0, 0.0, 0.0, -2.0, 0.0], "old_per_token_logps": [-1.5, -9.0, -9.0, -2.0, -9.0],
    }  # fmt: skip
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    table, _ = read(tmp_path)
    assert table.mask.tolist() == [True, False, False, True]
    assert table.trainer.tolist() == [-1.5, 0, 0, -2]


def test_miles_ranks_that_hold_the_same_responses_count_once() -> None:
    table, origin = read("miles")  # a folder of --dump-details, of which the trainer's side is read
    first = torch.load(DATA / "miles/train_data/7_0.pt", weights_only=True)["rollout_data"]
    assert (origin.framework, origin.files) == ("miles", 3)
    assert origin.dropped == {"the same response in the file of another rank": 2}
    assert table.starts.tolist() == [0, 2, 5, 7, 10]
    assert values(table, "ids")[:5] == [10, 11, 12, 13, 14]  # the last tokens: `tokens` begins with the prompt 1 2 3
    np.testing.assert_array_equal(table.behavior[:2], first["rollout_log_probs"][0].numpy())
    np.testing.assert_array_equal(table.trainer[:2], first["log_probs"][0].numpy())
    assert values(table, "group") == [0, 0, 1, 1]  # of the prompts 1 2 3 and 4 5
    assert values(table, "version") == [4, 4, 3, 3, 3, 4, 4, 3, 3, 3]
    # Versions count from the newest of the step.
    assert values(table, "proximal_version") == [4] * 4
    assert values(table, "age") == [0, 0, 1, 1, 1, 0, 0, 1, 1, 1]
    assert origin.assumes_current
    assert "oldest" in origin.findings[0].text
    assert values(table, "step") == [7] * 4


def miles_rank(path: Path, **changes: Any) -> None:
    """A rank's file with entries of `rollout_data` replaced, or removed where None."""
    payload = torch.load(DATA / "miles/train_data/7_0.pt", weights_only=True)
    data = {**payload["rollout_data"], **changes}
    payload["rollout_data"] = {name: value for name, value in data.items() if value is not None}
    torch.save(payload, path)


def test_miles_ranks_without_the_trainers_side_are_left_out(tmp_path: Path) -> None:
    miles_rank(tmp_path / "7_1.pt")
    miles_rank(tmp_path / "7_0.pt", log_probs=None)
    table, origin = read(tmp_path)
    assert table.responses == 2
    assert "files left out: 1 without the trainer's log-probs" in origin.findings[0].text


def test_miles_samples_may_name_one_version_each(tmp_path: Path) -> None:
    miles_rank(tmp_path / "7_0.pt", weight_versions=None, weight_version=[6, 5])
    assert values(read(tmp_path)[0], "version") == [6, 6, 5, 5, 5]


def test_miles_context_parallel_shards_are_refused(tmp_path: Path) -> None:
    payload = torch.load(DATA / "miles/train_data/7_0.pt", weights_only=True)
    torch.save(payload | {"cp_size": 2}, tmp_path / "7_0.pt")
    with pytest.raises(TrimtabError, match="2 context-parallel shards"):
        open_log([tmp_path])


def test_slime_puts_all_ranks_into_one_file() -> None:
    table, origin = read("slime", framework="slime")
    assert origin.framework == "miles"
    assert origin.responses == 4
    assert values(table, "reward") == [1, 0, 1, 0]
    assert values(table, "advantage") == [1, -1, 0.5, -0.5]
    miles, _ = read("miles/train_data")
    np.testing.assert_array_equal(table.behavior, miles.behavior)


def test_prime_rl_prompts_are_cut_and_nulls_counted() -> None:
    table, origin = read("prime-rl")
    rows = [json.loads(line) for line in (DATA / "prime-rl/token_exports/step_2/rank_0.jsonl").read_text().splitlines()]
    assert origin.framework == "prime-rl"
    assert origin.anchor == "current"
    # The first response has a trainer log-prob that was not finite, which the exporter writes as null.
    assert origin.nonfinite == {"logp_current nan": 1}
    assert not origin.dropped
    assert values(table, "ids")[table.starts[1] :] == rows[1]["token_ids"][1:] == [7, 8, 9, 10]
    np.testing.assert_allclose(table.trainer[table.starts[1] :], rows[1]["trainer_logprobs"][1:], rtol=1e-6)
    assert values(table, "advantage") == [1, -1]


def test_prime_rl_tokens_without_weight_in_the_rl_loss_are_untrained(tmp_path: Path) -> None:
    row = {"step": 1, "loss_mask": [False, True, True, True], "token_ids": [1, 2, 3, 4],
           "inference_logprobs": [0, 0, -1, -2], "trainer_logprobs": [0, -5, -1, -2],
           "rl_weights": [0, 0, 1, None]}  # fmt: skip
    (tmp_path / "rank_0.jsonl").write_text(json.dumps(row) + "\n")
    table, _ = read(tmp_path)
    assert values(table, "ids") == [3, 4]
    assert table.mask.all()


def nemo_rl_rows(step: int) -> list[dict[str, Any]]:
    """The lines as objects. Every value is a batch of one."""
    lines = (DATA / f"nemo-rl/train_data_step{step}.jsonl").read_text().splitlines()
    return [{name: value[0] for name, value in json.loads(line).items() if name != "idx"} for line in lines]


def test_nemo_rl_writes_batches_of_one_with_prompt_and_padding() -> None:
    table, origin = read("nemo-rl")
    rows = nemo_rl_rows(1)
    assert (origin.framework, origin.anchor, origin.files) == ("nemo-rl", "proximal", 2), "val_data_* is not read"
    assert origin.dropped == {"no part of the loss (sample_mask 0)": 2}
    assert np.diff(table.starts).tolist() == [4, 2, 5] * 2
    # From the first trained token to the last: a tool's message stays inside, the prompt's own answer does not.
    assert values(table, "ids")[:11] == [20, 21, 22, 23, 30, 31, 50, 51, 60, 61, 70]
    assert table.mask[:11].tolist() == [*[True] * 8, False, False, True]
    np.testing.assert_allclose(table.behavior[:4], rows[0]["generation_logprobs"][3:7], rtol=1e-6)
    np.testing.assert_allclose(table.trainer[:4], rows[0]["prev_logprobs"][3:7], rtol=1e-6)
    columns = {name: getattr(table, name).tolist() for name in ("step", "group", "reward", "advantage")}
    assert columns == {
        "step": [1, 1, 1, 2, 2, 2],  # of the file's name
        "group": [0, 0, 1, 2, 2, 3],  # by the prompt's tokens, in each step
        "reward": [1, 0, 1, 1, 0, 1],
        "advantage": [0.5, -0.5, 0.25, 0.5, -0.5, 0.25],
    }
    assert values(table, "prompt_length") == [3, 3, 2, 3, 3, 2]
    assert not {"step", "group", "reward"} & origin.missing.keys()
    assert tuple(found.text for found in origin.findings) == (
        "left out: no part of the loss (sample_mask 0), first in row 4 of train_data_step1.jsonl",
        "the files have no policy_version: tokens count as of the trainer's weights, since NeMo-RL sends its weights "
        "before every generation, unless async_grpo.enabled=true; if the sampler lags, add --columns policy_version=",
    )


def masking_run(folder: Path, share: float) -> Path:
    """A file of NeMo-RL in which `share` of 100 responses are far off and masked, as by its threshold."""
    rng, lines = np.random.default_rng(0), []
    for index in range(100):
        masked = index < 100 * share
        mu = -rng.uniform(0.1, 2.0, 8)
        pi = mu + (rng.choice([-1.0, 1.0], 8) if masked else rng.normal(0, 0.01, 8))
        row = {
            "token_ids": [5, *range(10, 18)],
            "token_loss_mask": [0] + [1] * 8,
            "generation_logprobs": [0.0, *mu],
            "prev_logprobs": [0.0, *pi],
            "advantages": [0.5] * 9,
            "content": ["user", "assistant"],
        }
        batch = {"sample_loss_mask": [0.0 if masked else 1.0], "rewards": [1.0], "input_lengths": [9]}
        lines.append(json.dumps({name: [value] for name, value in row.items()} | batch | {"idx": index}))
    path = folder / "train_data_step1.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_responses_that_nemo_rl_masks_for_their_mismatch_are_counted_and_measured(tmp_path: Path) -> None:
    diagnosis = diagnose(masking_run(tmp_path, 0.71))
    masked = diagnosis.measured.origin.masked
    assert (masked.responses, masked.share) == (71, 0.71)
    # Log-ratios of 1 and of -1, about as often: cosh(1) - 1 = .543, standard deviation .0074 by their balance.
    assert abs(masked.k3 - 0.543) < 0.037
    kept = diagnosis.measured.size.mismatch["k3"]
    assert kept < 1e-4
    assert masked.k3_with == pytest.approx(0.71 * masked.k3 + 0.29 * kept, rel=1e-6)
    text = "without 71 responses (71%) that the trainer masks out of its loss: k3 is 0."
    assert text in terminal_text(diagnosis)
    assert text in " ".join(answer for _, answer in answers(diagnosis))
    assert diagnosis.answer.severity == "warn"
    assert as_dict(diagnosis)["origin"]["masked"]["responses"] == 71
    nothing = diagnose(masking_run(tmp_path, 0.0))
    assert nothing.measured.origin.masked is None
    assert "masks out of its loss" not in terminal_text(nothing)


def test_nemo_rl_responses_outside_the_loss_can_be_read_all_the_same() -> None:
    _, origin = read("nemo-rl", columns={"sample_mask": ""})
    assert (origin.responses, origin.dropped) == (8, {})


def test_nemo_rl_dynamic_sampling_trains_on_filtered_rewards(tmp_path: Path) -> None:
    """Sampled prompts may outnumber trained ones: the last lines then hold nothing but a reward."""
    rows = [
        {name: [value] for name, value in row.items()} | {"rewards": [9.0], "filtered_rewards": [row["rewards"]]}
        for row in nemo_rl_rows(1)[:3]
    ]
    rows.append({name: [] for name in rows[0]} | {"rewards": [0.0], "idx": 3})
    (tmp_path / "train_data_step7.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table, origin = read(tmp_path)
    assert values(table, "reward") == [1, 0, 1]
    assert origin.dropped == {"no tokens": 1}


def test_nemo_rl_without_the_trainers_forward_names_the_option(tmp_path: Path) -> None:
    rows = [row | {"prev_logprobs": [0.0] * len(row["token_ids"])} for row in nemo_rl_rows(1)]
    text = "".join(json.dumps({name: [value] for name, value in row.items()}) + "\n" for row in rows)
    (tmp_path / "train_data_step1.jsonl").write_text(text)
    with pytest.raises(TrimtabError, match=r"prev_logprobs is 0 at every trained token.*force_on_policy_ratio"):
        read(tmp_path)


@pytest.mark.parametrize("name", ["trl", "verl/3.jsonl", "nemo-rl"])
def test_tokens_of_a_synchronous_trainer_are_of_age_0(name: str) -> None:
    table, origin = read(name)
    step = np.zeros(table.responses) if table.step is None else table.step
    assert origin.assumes_current
    assert not table.age.any()
    np.testing.assert_array_equal(table.proximal_version, step)
    assert {"policy_version", "proximal_version"} <= origin.missing.keys()
    found = diagnose(DATA / name)
    assert "tokens count as of the trainer's weights" in terminal_text(found)
    assert "separable" not in terminal_text(found)
    assert found.measured.split.why == "the age of 0 of all tokens is assumed, not recorded"
    asked, plain = read(name, columns={"policy_version": ""})
    assert asked.age is None
    assert not plain.assumes_current
    assert "age" not in [finding.name for finding in plain.findings]


@pytest.mark.parametrize(
    "name", ["trl/completions_00001.parquet", "verl/3.jsonl", "nemo-rl/train_data_step1.jsonl", "prime-rl"]
)
def test_versions_that_were_added_to_a_framework_s_files_are_read(name: str, tmp_path: Path) -> None:
    path = DATA / name if (DATA / name).is_file() else next((DATA / name).rglob("*.jsonl"))
    is_text = path.suffix == ".jsonl"
    lines = path.read_text().splitlines() if is_text else []
    rows = [json.loads(line) for line in lines] if is_text else pq.read_table(path).to_pylist()
    wrapped = "nemo-rl" in name  # a list of one value in each cell
    for row in rows:
        row |= {"policy_version": [3] if wrapped else 3, "proximal_version": [5] if wrapped else 5}
    file = tmp_path / f"{path.stem}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    table, origin = read(file)
    assert not origin.assumes_current
    assert set(values(table, "age")) == {2}


@pytest.mark.parametrize("name", ["prime-rl", "sglang"])
def test_tokens_of_asynchronous_and_of_unknown_trainers_have_no_age(name: str) -> None:
    table, origin = read(name)
    assert table.age is None
    assert not origin.assumes_current


def refusal(paths: list[Path], framework: str | None = None) -> str:
    with pytest.raises(TrimtabError) as caught:
        open_log(paths, framework=framework)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "lacks", "way"),
    [
        ("verl-text", "rollout_log_probs", "actor_rollout_ref.rollout.calculate_log_probs=True"),
        ("trl-text", "sampling_per_token_logps", "vllm_importance_sampling_correction"),
        ("nemo-rl/val_data_step2.jsonl", "logp_behavior", "--columns"),
        ("miles/rollout_data", "log_probs", "--dump-details DIR, without --use-rollout-logprobs"),
        ("open-instruct/run_rollouts_000000.jsonl", "trainer_logprobs", "--save_trainer_logprobs true"),
    ],
)
def test_a_dump_without_log_probs_names_the_option_that_gives_them(name: str, lacks: str, way: str) -> None:
    message = refusal([DATA / name])
    assert lacks in message
    assert way in message


@pytest.mark.parametrize(
    ("framework", "sampler", "way"),
    [
        ("verl", "rollout_log_probs", "algorithm.rollout_correction.bypass_mode=False"),
        ("trl", "sampling_per_token_logps", "vllm_importance_sampling_correction=True"),
    ],
)
def test_without_the_trainers_side_the_samplers_is_not_suggested(
    tmp_path: Path, framework: str, sampler: str, way: str
) -> None:
    masks = {"response_mask": [1, 1], "completion_mask": [1, 1]}
    (tmp_path / "1.jsonl").write_text(json.dumps({sampler: [-1.0, -2.0], "score": 1.0, **masks}) + "\n")
    message = refusal([tmp_path], framework)
    assert "has no logp_proximal, the trainer's log-probs" in message
    assert way in message
    assert "did you mean" not in message
    assert "calculate_log_probs" not in message


@pytest.mark.parametrize(
    ("names", "framework", "message"),
    [
        (("verl/3.jsonl", "trl"), None, "a file of verl and .* one of trl"),
        (("verl/3.jsonl",), "trl", "trl calls it sampling_per_token_logps"),
        (("verl/3.jsonl",), "veerl", "did you mean 'verl'"),
    ],
)
def test_another_framework_is_refused(names: tuple[str, ...], framework: str | None, message: str) -> None:
    assert re.search(message, refusal([DATA / name for name in names], framework))


NAME = "run_trainer_logprobs_step000003_rank0000{}.jsonl"
WHOLE = DATA / "open-instruct-one/run_trainer_logprobs_step000003.jsonl"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DATA / "open-instruct", tmp_path / "run"))


def test_packed_rows_are_read_one_sequence_at_a_time() -> None:
    table, origin = read("open-instruct-one")
    record = json.loads(WHOLE.read_text().splitlines()[0])
    assert (origin.framework, origin.anchor, origin.dropped, origin.findings) == ("open-instruct", "proximal", {}, ())
    assert values(table, "ids") == [30, 31, 32, 33, 40, 41, 50, 51, 52, 53, 54, 60, 61, 62]
    assert table.starts.tolist() == [0, 4, 6, 11, 14]
    assert table.mask.tolist() == [*[True] * 8, False, False, *[True] * 4], "a tool's output is untrained"
    # The first row is 10 11 12 30 31 32 33 10 11 12 40 41, and its lists begin at the second token.
    assert table.behavior[:6].tolist() == pytest.approx(record["vllm_logprobs"][2:6] + record["vllm_logprobs"][9:])
    assert table.trainer[:6].tolist() == pytest.approx(record["trainer_logprobs"][2:6] + record["trainer_logprobs"][9:])
    assert values(table, "version") == [2] * 4 + [1] * 2 + [2] * 8
    assert values(table, "group") == [0, 0, 1, 1], "by the tokens of the prompt, wherever it is in a row"
    assert values(table, "step") == [3] * 4


def test_slices_of_the_ranks_are_joined() -> None:
    whole, _ = read("open-instruct-one")
    table, origin = read("open-instruct")
    assert (origin.files, origin.responses, origin.dropped, origin.findings) == (2, 4, {}, ()), "rollouts are not read"
    # The first token of a slice is in no file: 33 and 54.
    kept = [position for position, token in enumerate(values(whole, "ids")) if token not in (33, 54)]
    for name in ("ids", "mask", "behavior", "trainer", "version"):
        assert values(table, name) == [values(whole, name)[position] for position in kept], name
    assert values(table, "group") == [0, 0, 1, 1]


def test_slices_of_compact_json_are_joined(run: Path) -> None:
    for rank in range(4):
        path = run / NAME.format(rank)
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows = [dict(sorted(row.items(), key=lambda item: item[0] == "sp_size")) for row in rows]  # as the last key
        path.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))
    table, origin = read(run)
    assert (table.responses, origin.dropped) == (4, {})


def test_one_rank_stands_for_all_of_its_rows(run: Path) -> None:
    for ranks in ((3,), (2, 3), (3, 2)):
        table, _ = read(*(run / NAME.format(rank) for rank in ranks))
        assert values(table, "ids") == [50, 51, 52, 53, 60, 61, 62]
    (run / NAME.format(2)).unlink()
    with pytest.raises(TrimtabError, match=r"no file .*rank00002\.jsonl"):
        open_log([run])


def test_a_row_of_which_a_slice_is_missing_is_counted(run: Path) -> None:
    for rank in (0, 1):
        path = run / NAME.format(rank)
        text = path.read_text()
        path.write_text(text + (text if rank == 0 else text[:100]))  # the run was killed here
    table, origin = read(run)
    assert table.responses == 4
    assert origin.dropped == {"unfinished last line": 1, "its slice in the file of another rank is missing": 1}


def test_rows_of_a_batch_are_told_apart(tmp_path: Path) -> None:
    """Numbers of sequences begin at 1 in each row of a batch: two rows of one sequence each, the second padded."""
    record = {
        "step": 5, "sample_idx": 0, "sp_size": 1, "trainer_model_step": 5,
        "attention_mask": [1, 1, 1, 1, 1, 0], "response_mask": [False, True, True, False, True, False],
        "token_ids": [1, 2, 3, 4, 5, 0], "model_steps": [5, 5, 5, 3, 3, 0],
        "vllm_logprobs": [float("nan"), -1.0, -2.0, float("nan"), -3.0, 1.0],
        "trainer_logprobs": [1.0, -1.5, -2.0, 1.0, -3.5, 1.0],
    }  # fmt: skip
    record |= {f"{name}_shape": [2, 3] for name, value in list(record.items()) if isinstance(value, list)}
    (tmp_path / "r_trainer_logprobs_step000005.jsonl").write_text(json.dumps(record) + "\n")
    table, origin = read(tmp_path)
    assert origin.dropped == {}
    assert table.starts.tolist() == [0, 2, 3]
    assert table.trainer.tolist() == [-1.5, -2.0, -3.5]
    # The trainer of step 5 has the weights of step 4; those sampled with "5" are the first ones of a resumed run.
    assert values(table, "proximal_version") == [5, 4]


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("vllm_logprobs", [-1.0], "lists of different lengths"),
        ("vllm_logprobs_shape", [2, 11], "lists of different lengths"),
        ("token_ids", [["a"], 2], "lists of different lengths"),
        ("attention_mask", ["a"] * 11, "lists of different lengths"),
        ("attention_mask_shape", [1, 1, 11], "lists of different lengths"),
        ("sp_size", 2, "its slice in the file of another rank is missing"),
        ("trainer_model_step", [1], "no proximal_version"),
        ("model_steps", [None] * 11, "no proximal_version"),
    ],
)
def test_a_damaged_row_is_dropped_and_counted(tmp_path: Path, name: str, value: Any, reason: str) -> None:
    records = [json.loads(line) for line in WHOLE.read_text().splitlines()]
    [damaged] = [record for record in records if 30 in record["token_ids"]]
    damaged[name] = value
    (tmp_path / WHOLE.name).write_text("".join(json.dumps(record) + "\n" for record in records))
    table, origin = read(tmp_path)
    assert table.responses == 2
    assert origin.dropped == {reason: 1 if "list" in reason or "slice" in reason else 2}  # rows, or sequences
