"""The laboratory: experiments over objectives, regimes and seeds."""
