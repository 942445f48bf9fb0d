"""The routing section of a recipe: which expert choices a mixture-of-experts model is trained with."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trimtab.config.section import Section


class RoutingConfig(Section):
    """Routing replay (METHODS 8.1). Only the choice is replayed: gates come from the scores of the pass itself."""

    replay: Literal["none", "proximal", "rollout"] = Field(
        default="none",
        description="`proximal`: experts of the proximal pass, replayed in the update (R2); `rollout`: experts the "
        "engine used, replayed in every pass of the trained policy (R3)",
    )
