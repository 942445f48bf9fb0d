"""The recipe section of the optimizer and its learning rate."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from trimtab.trainer.config.section import NotNegative, Positive, Section, Whole

Share = Annotated[float, Field(ge=0, lt=1)]


class EssConfig(Section):
    """Scaling the rate of each update by the effective sample size of its weights (VCPO, arXiv 2602.17616)."""

    base: float = Field(
        default=1.0, gt=0, le=1, description="share of the responses above which the rate is not lowered"
    )
    rule: Literal["sqrt", "linear"] = Field(default="sqrt", description="how the rate follows size / base")
    level: Literal["sequence", "geometric"] = Field(
        default="sequence", description="of the weights; products of long responses leave a size of 1 by length alone"
    )


class OptimConfig(Section):
    """AdamW and its learning rate."""

    lr: float = Field(default=1e-6, gt=0, le=1e38, description="learning rate after the warm-up")
    betas: tuple[Share, Share] = Field(
        default=(0.9, 0.95), strict=False, description="decay rates of the two moments, each from 0 to below 1"
    )
    eps: Positive = Field(default=1e-8, description="added to the denominator of the update")
    weight_decay: NotNegative = Field(default=0.0, description="decoupled weight decay")
    grad_clip: Positive = Field(default=1.0, description="largest norm of the gradient of an update")
    schedule: Literal["constant", "cosine"] = Field(default="constant", description="of the learning rate")
    warmup: Whole = Field(default=0, description="updates of linear warm-up")
    min_lr: NotNegative = Field(default=0.0, description="where cosine ends")
    ess: EssConfig | None = None
