"""`trimtab preflight`: is a pair of sampler and trainer fit to train?

build_pair        the pair that a command line or a recipe describes
engine_pair       sampler and trainer of one model, and responses with the log-probs of both
checklist         the checks, and the result of all of them
weight_checks     the check that changed weights arrive in the sampler
preflight_page    the page
rescoring         `trimtab rescore`: a third implementation scores the ids of a dump
"""
