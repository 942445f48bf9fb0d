"""What one process refuses that only several ranks can do."""

from __future__ import annotations

import pytest

from trimtab.config import load_config
from trimtab.errors import TrimtabError
from trimtab.training.followers import check_sharding


@pytest.mark.parametrize("option", ["sharding.offload=true", "sharding.reshard=false"])
def test_sharding_options_need_several_ranks(option: str) -> None:
    with pytest.raises(TrimtabError, match=r"\[sharding\] has no effect with one process: start several"):
        check_sharding(load_config("laboratory", [option]))
    with pytest.raises(TrimtabError, match=r"ray\.trainers"):
        check_sharding(load_config("laboratory", [option, "placement=ray"]))
    check_sharding(load_config("laboratory", [option, "placement=ray", "ray.trainers=2"]))
    check_sharding(load_config("laboratory", []))
